"""Text for the bundled model: its own samples, and documents that need long-range recall."""

from dofla.data import TokenWindows
from dofla.errors import DoflaError, check_choice, check_numbers
from dofla.runs.demo import WINDOWS
from dofla.storage.tensors import read_tensors

_SPLITS = ("train", "validation")


def demo_windows(windows: int | None = None, length: int = 512, *, split: str = "train") -> TokenWindows:
    """The first bundled windows [N, L], or pieces of them. There are 256 of 512 tokens, and 48 for ``validation``.

    Raises:
        DoflaError: another split; a number below 1; a length above 512.
    """
    check_choice("split", split, _SPLITS)
    check_numbers(length=length, windows=1 if windows is None else windows)
    tokens, _ = read_tensors(WINDOWS / f"{split}.safetensors", "install dofla again")
    rows = tokens["input_ids"]
    if length > rows.shape[1]:
        raise DoflaError(f"length is {length}: the demo's windows have {rows.shape[1]} tokens; give as many or fewer")
    pieces = rows[:, : rows.shape[1] // length * length].reshape(-1, length)
    return TokenWindows(pieces[:windows], source=f"demo: own samples and recall documents ({split})")
