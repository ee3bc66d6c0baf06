"""What one would use instead of dofla, on the same machine: time of a prompt and of a token after it.

    python benchmarks/peers/timing.py --model models/smollm2-135m --kvpress build/peers/bin/python

The students of docs/students, or those of ``--student NAME=FOLDER``, take turns at every prompt and every token with
the softmax cache and, where optimum-quanto is installed, quantized ones; of each the least time is taken. ``--kvpress``
is the Python of an environment with ``benchmarks/peers/requirements.txt``: there press_timing.py times presses that
leave as many tokens as have the bytes of a student, in turns with a softmax cache of its own. Behind a time stands how
many times that of the softmax cache of the same turns it is. In bfloat16, which wants a processor that has it; or in
another ``--dtype``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import transformers
import typer
from continuation import CODED, coded_bytes, held_by, saved
from judging import SOFTMAX, token_bytes
from rich.console import Console
from rich.table import Table
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache

import dofla
from dofla.display import size, table
from dofla.integration.cache import cache_bytes
from dofla.integration.checkpoint import load_model
from dofla.storage.files import write_json

sys.path.append(str(Path(__file__).parents[1] / "speed"))
from latency import feed, random_tokens
from model import machine
from turns import least

STUDENTS = Path(__file__).parents[2] / "docs/students"
SHIPPED = {
    "dofla.compress, 1.5 MiB": "smollm2-135m-compressed",
    "dofla.compress, 5.8 MiB": "smollm2-135m-compressed-256",
}
Seconds = dict[str, float]


@dataclass
class Memory:
    """A model, and the cache that it is to write."""

    model: PreTrainedModel
    empty: Callable[[], Cache]

    def read(self, ids: torch.Tensor) -> Cache:
        """What is left of them."""
        cache = self.empty()
        feed(self.model, ids, cache)
        return cache


def memories(model: PreTrainedModel, students: dict[str, PreTrainedModel]) -> dict[str, Memory]:
    """By name; the softmax cache is the first."""

    def coded(bits: int) -> Cache:
        return QuantizedCache("quanto", model.config, nbits=bits)

    found = {SOFTMAX: Memory(model, lambda: DynamicCache(config=model.config))}
    found |= {name: Memory(model, partial(coded, bits)) for name, bits in CODED.items()}
    return found | {name: Memory(each, partial(DynamicCache, config=each.config)) for name, each in students.items()}


@torch.inference_mode()
def timed(
    memories: dict[str, Memory], length: int, repeats: int, new_tokens: int
) -> tuple[Seconds, Seconds, dict[str, int]]:
    """Of a prompt of so many tokens, and of a token after it; and the bytes in between."""
    ids, caches = random_tokens(memories[SOFTMAX].model, 1, length), {}

    def read(name: str) -> None:
        caches[name] = memories[name].read(ids)

    prompts = least({name: partial(read, name) for name in memories}, repeats)
    held = {
        name: coded_bytes(cache) if isinstance(cache, QuantizedCache) else cache_bytes(cache)
        for name, cache in caches.items()
    }
    calls = {name: partial(feed, memories[name].model, ids[:, :1], cache) for name, cache in caches.items()}
    return prompts, least(calls, new_tokens), held


def of_presses(python: Path, model: str, lengths: list[int], kept: list[int], *options: str) -> list[dict[str, Any]]:
    """Rows of press_timing.py."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        words = [python, Path(__file__).with_name("press_timing.py"), "--model", model, out, *options]
        words += [word for n in lengths for word in ("--length", n)] + [word for n in kept for word in ("--kept", n)]
        subprocess.run(list(map(str, words)), check=True)
        return json.loads(out.read_text(encoding="utf-8"))["rows"]


def merged(rows: list[dict[str, Any]]) -> Table:
    """A line of each memory; of each length its bytes, seconds of a prompt and milliseconds of a token."""
    lengths = sorted({row["length"] for row in rows})
    heads = [f"{what} {length:,}" for length in lengths for what in ("bytes after", "s of", "ms after")]
    shown = table("memory", *heads)
    softmax = {(row["turns"], row["length"]): row for row in rows if row["memory"] == SOFTMAX}
    for name in dict.fromkeys(row["memory"] for row in rows):
        cells = []
        for length in lengths:
            row = next(row for row in rows if (row["memory"], row["length"]) == (name, length))
            beside = softmax[row["turns"], length]
            prompt, token = (f"{row[x] / beside[x]:.2f} x" for x in ("prompt", "token"))
            cells += [size(row["bytes"]), f"{row['prompt']:.2f}, {prompt}", f"{1e3 * row['token']:.1f}, {token}"]
        shown.add_row(name, *cells)
    return shown


def main(
    model: Annotated[str, typer.Option(help="Folder or hub name of a causal model.")],
    student: Annotated[
        list[str] | None, typer.Option(help="NAME=FOLDER of an adapter of it; repeatable; default the two shipped.")
    ] = None,
    length: Annotated[list[int] | None, typer.Option(help="Of a prompt; repeatable; default 2048 and 8192.")] = None,
    dtype: Annotated[str, typer.Option(help="Of all models.")] = "bfloat16",
    repeats: Annotated[int, typer.Option(min=1, help="Times each prompt is read.")] = 1,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded after each.")] = 24,
    kvpress: Annotated[Path | None, typer.Option(help="Python of an environment with kvpress.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    transformers.logging.set_verbosity_error()
    found: dict[str, Any] = {"machine": machine("cpu"), "dtype": dtype, "rows": []}
    print(", ".join(f"{key} {value}" for key, value in found["machine"].items()), flush=True)
    options, lengths = {"dtype": getattr(torch, dtype)}, sorted(length or [2048, 8192])
    adapters = saved(student) if student else {name: str(STUDENTS / folder) for name, folder in SHIPPED.items()}
    students = {name: dofla.load(folder, base_model=model, **options) for name, folder in adapters.items()}
    teacher = load_model(model, **options)
    for n in lengths:
        prompts, tokens, held = timed(memories(teacher, students), n, repeats, new_tokens)
        found["rows"] += [
            {"memory": x, "turns": "dofla", "length": n, "prompt": prompts[x], "token": tokens[x], "bytes": held[x]}
            for x in prompts
        ]
    if kvpress:
        kept = sorted({held_by(each) // token_bytes(teacher) for each in students.values()})
        counts = ["--repeats", str(repeats), "--new-tokens", str(new_tokens), "--dtype", dtype]
        found["rows"] += of_presses(kvpress, model, lengths, kept, *counts)
    if out:
        write_json(out, found)
    Console(width=200).print(merged(found["rows"]))


if __name__ == "__main__":
    typer.run(main)
