"""Milliseconds of a token by how threads wait for each other: on an idle machine, and while another process takes a
core.

    python benchmarks/speed/waiting.py models/smollm2-135m

OpenMP's threads spin, and sleep after so many rounds (``GOMP_SPINCOUNT``) or at once (``OMP_WAIT_POLICY=PASSIVE``).
``import dofla`` before torch makes them sleep after as many as the first row says; the last row is OpenMP's own habit.
Each row is a process of its own, and ``generate`` is timed: of the original, and compressed, as it is and compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Annotated, Any

import torch
import transformers
import typer
from latency import random_tokens
from rich.console import Console

import dofla
from dofla.display import table
from dofla.runs.opening import open_original
from dofla.serving import CompiledModel

WAITS = {
    "dofla": {"GOMP_SPINCOUNT": "1000"},
    "asleep at once": {"OMP_WAIT_POLICY": "PASSIVE"},
    "10,000 rounds": {"GOMP_SPINCOUNT": "10000"},
    "OpenMP": {},
}
WAYS = "softmax", "compressed", "compiled"


def main(
    model: Annotated[str, typer.Argument(help="Folder of a model.")],
    size: Annotated[str, typer.Option(help="Of the compressed cache.")] = "1.5MiB",
    context: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to time.")] = 32,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
) -> None:
    if worker:
        print(json.dumps(measured(model, size, context, new_tokens)))
        return
    shown = table("threads wait as", *(f"{way}, {kind}" for kind in ("idle", "busy") for way in WAYS))
    rest = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    words = [sys.executable, __file__, model, f"--size={size}", f"--context={context}", f"--new-tokens={new_tokens}"]
    for name, wait in WAITS.items():
        found: list[float] = []
        for busy in (False, True):
            with ExitStack() as stack:
                if busy:
                    other = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
                    stack.callback(other.kill)
                done = subprocess.run([*words, "--worker"], env=rest | wait, stdout=subprocess.PIPE, check=True)
            found += json.loads(done.stdout.splitlines()[-1])
        shown.add_row(name, *(f"{1e3 * seconds:.1f}" for seconds in found))
        print(f"{name}: done", file=sys.stderr)
    Console(width=110).print(shown)


def measured(name: str, size: str, context: int, new_tokens: int) -> list[float]:
    """Seconds of a token in each of :data:`WAYS`: the least of four calls, less the least of those for two tokens."""
    transformers.logging.set_verbosity_error()
    original, _ = open_original(name)
    model, tokenizer = open_original(name)
    dofla.compress(model, size=size, tokenizer=tokenizer, progress=False)
    ways: list[Callable[..., Any]] = [original.generate, model.generate, CompiledModel(model).generate]
    torch.manual_seed(0)
    ids = random_tokens(model, 1, context)

    def seconds(generate: Callable[..., Any], count: int) -> float:
        begun = time.perf_counter()
        generate(ids, min_new_tokens=count, max_new_tokens=count, do_sample=False, pad_token_id=0)
        return time.perf_counter() - begun

    found = []
    for generate in ways:
        seconds(generate, 4)
        short, long = zip(*((seconds(generate, 2), seconds(generate, 2 + new_tokens)) for _ in range(4)), strict=True)
        found.append((min(long) - min(short)) / new_tokens)
    return found


if __name__ == "__main__":
    typer.run(main)
