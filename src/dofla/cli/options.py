"""Options that several verbs share."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Annotated

import typer

from dofla.errors import DoflaError


def _seed(value: int) -> int:
    # Not typer's min=0, whose "int range" takes a quarter of the width of every help page.
    if value < 0:
        raise DoflaError(f"seed is {value}: give 0 or more")
    return value


ModelArgument = Annotated[str, typer.Argument(help="Folder, hub name, 'demo', or package:NAME/FOLDER.")]
StudentArgument = Annotated[str, typer.Argument(help="Folder or hub name: an adapter, or standalone.")]
BaseModel = Annotated[
    str | None, typer.Option(help="Folder or hub name of an adapter's base model, if not where it says.")
]
Data = Annotated[
    str, typer.Option(help="Text file (.gz too), JSONL, Parquet, tokens, a datasets name, 'self', or 'demo'.")
]
Length = Annotated[int, typer.Option(help="Tokens per window.")]
Windows = Annotated[int, typer.Option(help="Windows at most.")]
BatchSize = Annotated[int, typer.Option(help="Windows per forward pass.")]
Padded = Annotated[bool, typer.Option("--padded", help="One text per window, padded: for encoders.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16; default: the checkpoint's, where that is not slow.")
]
Stream = Annotated[bool, typer.Option("--stream", help="Leave the layers on disk: for models larger than memory.")]
Seed = Annotated[int, typer.Option(callback=_seed, help="Seed of everything random.")]
Lambda = Annotated[float, typer.Option("--lambda", help="Tolerance of the degrees of freedom.")]
TokenDtype = Annotated[
    str | None, typer.Option(help="How exact tokens are kept, int8 or model; default: int8, an encoder's model.")
]
Track = Annotated[
    list[str] | None, typer.Option(help="Keep losses in tensorboard, wandb, ... as well, by accelerate; repeatable.")
]
KeepSoftmax = Annotated[list[str] | None, typer.Option(help="Attention module to leave as it is; repeatable.")]
Size = Annotated[str | None, typer.Option(help="Bytes of the compressed cache per sequence, as 1.5MiB.")]
Ratio = Annotated[float | None, typer.Option(help="Or its compression factor at --context tokens; default 16.")]
Context = Annotated[
    int | None, typer.Option(help="Context length to calibrate for; default all positions of the model.")
]
RetrievalHeads = Annotated[
    int, typer.Option(help="KV heads that keep the full context: better recall, slightly worse perplexity.")
]
Out = Annotated[Path, typer.Option(help="New folder or file to write.")]


def refuse_existing(path: Path | None) -> None:
    """Raise DoflaError if a file that is to be written after a long time exists, or cannot be made there."""
    if path is None:
        return
    if path.exists():
        raise DoflaError(f"{path} exists already: choose another file or remove it")
    if not path.parent.is_dir():
        raise DoflaError(f"cannot write {path}: there is no folder {path.parent}: make it first")
    if not os.access(path.parent, os.W_OK):
        from dofla.storage.files import cannot_write

        raise cannot_write(path, errno.EACCES)
