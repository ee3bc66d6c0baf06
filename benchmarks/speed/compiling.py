"""Seconds until the first token of a compiled model: in the process that compiles, and in a later one, which finds the
graph on disk.

    python benchmarks/speed/compiling.py models/smollm2-135m

Each process opens and compresses the model and writes with ``dofla.serving.CompiledModel``; the graphs are in a folder
of their own, which is removed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from latency import random_tokens
from rich.console import Console

import dofla
from dofla.display import table
from dofla.runs.opening import open_original
from dofla.serving import CompiledModel

_NAMES = "first process", "later process"


def main(
    model: Annotated[Path, typer.Argument(help="Folder of a model.")],
    size: Annotated[str, typer.Option(help="Of the compressed cache.")] = "1.5MiB",
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to time.")] = 64,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
) -> None:
    if worker:
        print(*measured(model, size, batch, context, new_tokens))
        return
    shown = table("", "first token, s", "a token then, ms", "graphs on disk, MiB")
    with tempfile.TemporaryDirectory() as folder:
        for name in _NAMES:
            given = ["--size", size, *(f"--{k}={v}" for k, v in (("batch", batch), ("context", context)))]
            words = [sys.executable, __file__, str(model), *given, f"--new-tokens={new_tokens}", "--worker"]
            env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder}
            done = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=True)
            first, token = map(float, done.stdout.split()[-2:])
            held = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
            shown.add_row(name, f"{first:.0f}", f"{1e3 * token:.1f}", f"{held / 2**20:.0f}")
    Console().print(shown)


def measured(folder: Path, size: str, batch: int, context: int, new_tokens: int) -> tuple[float, float]:
    """Seconds until the first token, and of each token in later calls, the least of three."""
    model, tokenizer = open_original(str(folder))
    dofla.compress(model, size=size, tokenizer=tokenizer, progress=False)
    compiled, ids = CompiledModel(model), random_tokens(model, batch, context)

    def write(count: int) -> float:
        begun = time.perf_counter()
        compiled.generate(ids, min_new_tokens=count, max_new_tokens=count, do_sample=False, pad_token_id=0)
        return time.perf_counter() - begun

    torch.manual_seed(0)
    first = write(2)
    return first, min((write(8 + new_tokens) - write(8)) / new_tokens for _ in range(3))


if __name__ == "__main__":
    typer.run(main)
