"""Text for the bundled model: its own samples, and documents that need long-range recall."""

import torch

from dofla.data import TokenWindows
from dofla.errors import DoflaError, check_choice, check_numbers
from dofla.runs.demo import WINDOWS
from dofla.storage.tensors import read_tensors

_SPLITS = {"train": ["train"], "validation": ["validation"], "all": ["train", "validation"]}


DEMO_LENGTH = 512
"""Tokens of a bundled window."""


def demo_windows(windows: int | None = None, length: int = DEMO_LENGTH, *, split: str = "train") -> TokenWindows:
    """The first bundled windows [N, L], or pieces of them. There are 256 of 512 tokens in ``train``, 48 in
    ``validation``, and ``all``.

    Raises:
        DoflaError: another split; a number below 1; a length above 512.
    """
    check_choice("split", split, [*_SPLITS])
    check_numbers(length=length, windows=1 if windows is None else windows)
    files = [WINDOWS / f"{part}.safetensors" for part in _SPLITS[split]]
    rows = torch.cat([read_tensors(file, "install dofla again")[0]["input_ids"] for file in files])
    if length > rows.shape[1]:
        raise DoflaError(f"length is {length}: the demo's windows have {rows.shape[1]} tokens; give as many or fewer")
    pieces = rows[:, : rows.shape[1] // length * length].reshape(-1, length)
    return TokenWindows(pieces[:windows], source=f"demo: own samples and recall documents ({split})")
