"""Options that several verbs share, and the checks of what they name.

A callback runs while the command line is read: what it refuses is refused before torch is imported.
"""

import errno
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from dofla.cli.settings import Function
from dofla.errors import DoflaError

OUTPUT = "Output"
"""The panel of options for what is printed."""
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def _model(name: str | None) -> str | None:
    if name is None or name == "demo" or name.startswith("package:") or os.path.exists(name):
        return name
    if not _HUB_NAME.fullmatch(name):
        raise DoflaError(f"cannot load model {name!r}: there is no such folder: give a folder, a hub name, or demo")
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE and not (Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").exists():
        raise DoflaError(
            f"cannot load model {name!r}: there is no such folder, and with HF_HUB_OFFLINE no such model of the hub"
        )
    return name


def source(given: Any) -> Any:
    """A callback: DoflaError for a text file, or one of several, that does not exist."""
    from dofla.data.documents import check_source

    for text in [given] if isinstance(given, str) else given or ():
        if text not in ("self", "demo", "sample"):
            check_source(text)
    return given


def existing(what: str) -> Callable[[Path | None], Path | None]:
    """A callback: DoflaError for a file or folder with ``what`` that does not exist."""

    def check(path: Path | None) -> Path | None:
        if path is not None and not path.exists():
            raise DoflaError(f"{path} does not exist: it should hold {what}")
        return path

    return check


def new_file(path: Path | None) -> Path | None:
    """A callback: DoflaError if a file that is to be written after a long time exists, or cannot be made there."""
    if path is None:
        return path
    if path.exists():
        raise DoflaError(f"{path} exists already: choose another file or remove it")
    if not path.parent.is_dir():
        raise DoflaError(f"cannot write {path}: there is no folder {path.parent}: make it first")
    if not os.access(path.parent, os.W_OK):
        reason = os.strerror(errno.EACCES)
        raise DoflaError(f"cannot write {path}: {reason}: choose another folder, or allow writing to this one")
    return path


def new_folder(path: Path | None) -> Path | None:
    """A callback: DoflaError for a folder that holds something, and for a file."""
    if path is not None and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DoflaError(f"{path} exists already: choose another output folder or remove it")
    return path


ModelArgument = Annotated[
    str, Argument(metavar="MODEL", help="Folder, hub name, 'demo', or package:NAME/FOLDER.", callback=_model)
]
CompressedModel = Annotated[
    str, Argument(metavar="MODEL", help="Folder or hub name of a compressed model or adapter.", callback=_model)
]
DATA = "a file (text, JSONL, Parquet, tokens), a datasets name, demo, sample, or self (the model's samples)"
Data = Annotated[str, Option(help=f"Text: {DATA}.", callback=source)]
SelfData = Annotated[str, Option(help=f"Calibration text: {DATA}.", callback=source)]
Length = Annotated[int, Option(help="Length of a window, in tokens.")]
Windows = Annotated[int, Option(help="Number of windows, at most.")]
Device = Annotated[
    str | None, Option(help="Device: cpu, cuda, cuda:1, mps, or auto (a GPU if there is one); default cpu.")
]
Lambda = Annotated[float, Option("--lambda", help="Regularization λ of the degrees of freedom.")]
Size = Annotated[str | None, Option(help="Size of the compressed cache per sequence, as 1.5MiB.")]
Ratio = Annotated[
    float | None, Option(help="Compression factor instead of a size, against a bfloat16 cache; default 16.")
]
Out = Annotated[Path, Option(help="Folder to write; it must be new.", callback=new_folder)]

Given = Any
"""Type of a verb's parameter that is filled by ``--set``; its default is the :class:`Function` that has the fields."""
ORIGINAL = Function("runs/opening.py", "open_converted", ("base_model",))
IN_MEMORY = Function("runs/opening.py", "open_converted", ("base_model", "offload"))
"""For verbs that need gradients, or the weights themselves."""
COMPRESSED = Function("runs/opening.py", "open_converted")
DRAWS = Function("cli/options.py", "set_seed")


def set_seed(seed: int = 0) -> None:
    """Seed what is sampled.

    Args:
        seed: of the tokens that are sampled.
    """
    import torch

    if seed < 0:
        raise DoflaError(f"seed is {seed}: give 0 or more")
    torch.manual_seed(seed)


def text_of(without: Sequence[str] = (), **defaults: Any) -> Function:
    """The fields of text cut into windows, with defaults of the verb."""
    return Function("integration/self_samples.py", "token_windows", ("split", "progress", *without), defaults)
