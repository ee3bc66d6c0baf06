"""Options that several verbs share, and the checks of what they name.

A callback runs while the command line is read: what it refuses is refused before torch is imported.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from dofla.errors import DoflaError

MODEL, TEXT, OUTPUT = "Model", "Text", "Output"
"""Panels of a verb's help, with typer's own for all other options."""
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def _seed(value: int) -> int:
    # Not typer's min=0, whose "int range" takes a quarter of the width of every help page.
    if value < 0:
        raise DoflaError(f"seed is {value}: give 0 or more")
    return value


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


def source(text: str | None) -> str | None:
    """A callback: DoflaError for a text file that does not exist."""
    from dofla.data.documents import check_source

    if text not in (None, "self", "demo", "sample"):
        check_source(text)
    return text


def sources(texts: list[str] | None) -> list[str] | None:
    """The same of several."""
    for text in texts or ():
        source(text)
    return texts


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
    str,
    typer.Argument(metavar="MODEL", help="Folder, hub name, 'demo', or package:NAME/FOLDER.", callback=_model),
]
StudentArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Folder or hub name of a compressed model or adapter.", callback=_model),
]
BaseModel = Annotated[
    str | None,
    typer.Option(
        help="Base model of an adapter: a folder or hub name; default: the one the adapter names.",
        rich_help_panel=MODEL,
        callback=_model,
    ),
]
DATA = "a file (text, JSONL, Parquet, tokens), a datasets name, demo, sample, or self (the model's samples)"
Data = Annotated[str, typer.Option(help=f"Text: {DATA}.", rich_help_panel=TEXT, callback=source)]
SelfData = Annotated[
    str,
    typer.Option(help=f"Calibration text: {DATA}.", rich_help_panel=TEXT, callback=source),
]
Length = Annotated[int, typer.Option(help="Length of a window, in tokens.", rich_help_panel=TEXT)]
Windows = Annotated[int, typer.Option(help="Number of windows, at most.", rich_help_panel=TEXT)]
BatchSize = Annotated[int, typer.Option(help="Windows per forward pass.", rich_help_panel=TEXT)]
Padded = Annotated[
    bool, typer.Option("--padded", help="One text per window, padded: for encoders.", rich_help_panel=TEXT)
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Data type: float32, bfloat16 or float16; default: the checkpoint's, float32 where that is slow.",
        rich_help_panel=MODEL,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="Device: cpu, cuda, cuda:1, mps, or auto (a GPU if there is one); default cpu.", rich_help_panel=MODEL
    ),
]
Offload = Annotated[
    Path | None,
    typer.Option(
        help="Folder for offload: layers that do not fit in memory are read from disk as needed.",
        rich_help_panel=MODEL,
    ),
]
Seed = Annotated[int, typer.Option(callback=_seed, help="Random seed.")]
Lambda = Annotated[float, typer.Option("--lambda", help="Regularization λ of the degrees of freedom.")]
TokenDtype = Annotated[
    str | None, typer.Option(help="Data type of exact tokens: int8 or model; default: int8; for encoders: model.")
]
Track = Annotated[
    list[str] | None,
    typer.Option(help="Loss tracker, through accelerate: tensorboard, wandb, ...; repeatable.", rich_help_panel=OUTPUT),
]
KeepSoftmax = Annotated[
    list[str] | None, typer.Option(help="Attention module to leave unchanged; repeatable; default none.")
]
Size = Annotated[
    str | None, typer.Option(help="Size of the compressed cache per sequence, as 1.5MiB; default: see --ratio.")
]
Ratio = Annotated[
    float | None,
    typer.Option(help="Compression factor instead, against a bfloat16 cache of --context tokens; default 16."),
]
Context = Annotated[
    int | None, typer.Option(help="Context length to compress for, in tokens; default: all positions of the model.")
]
RetrievalHeads = Annotated[
    int, typer.Option(help="KV heads that keep the full context: better recall, slightly worse perplexity.")
]
Out = Annotated[
    Path, typer.Option(help="Folder to write; it must be new.", rich_help_panel=OUTPUT, callback=new_folder)
]
