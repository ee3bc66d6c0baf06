"""What one would use instead of dofla, on the same model and the same text: bytes of the cache against loss increase.

    python benchmarks/peers/continuation.py --model models/smollm2-135m --length 2048 \\
        --calibrate data/english-train.txt.gz --text data/books-val.txt.gz \\
        --text data/english-val.txt.gz --text data/stories-val.txt.gz \\
        --out runs/peers-2048 --kvpress build/peers/bin/python

A row is a memory; its loss increase is what the last 512 tokens of a window lose against softmax attention, in nats per
token: a mean over windows with an interval of 95 % by bootstrap, and so is what it loses beyond dofla at the same
bytes, over the windows of all texts. Windows are the ends of longer ones (``--longest``), so that at
every ``--length`` the same tokens are judged, with more or less before them. Python source, the modules of the standard
library of the interpreter that runs this, is always among the texts.

``--dofla OPTIONS`` adds a cache that grows: evict=false, or size=1.5MiB with its heads that hold every token.
``--student NAME=FOLDER`` puts an adapter of the same model beside them, one that was trained, say: a row of the bytes,
among those of ``--cache``, that are nearest to its own.

What is measured stays in the folder and is not measured again. ``--kvpress`` is the Python of an environment with
``benchmarks/peers/requirements.txt``, where presses.py is run; ``--windows 1`` tries everything in minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean
from typing import Annotated

import torch
import typer
from judging import (
    LIMITS,
    SOFTMAX,
    WRITTEN,
    Row,
    bytes_of,
    filled,
    loss_of,
    read_prompt,
    read_rows,
    read_texts,
    token_bytes,
)
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, Cache, PreTrainedModel, QuantizedCache
from transformers.utils import is_optimum_quanto_available

import dofla
from dofla.compression.calibration import Calibration
from dofla.compression.directions import default_cut
from dofla.compression.plan import compressed_plan
from dofla.compression.size import parse_size
from dofla.compression.target import Target
from dofla.display import size, table
from dofla.errors import DoflaError
from dofla.evaluation.language import bootstrap_interval
from dofla.evaluation.verdict import perplexity
from dofla.integration.cache import cache_bytes
from dofla.integration.checkpoint import load_model
from dofla.integration.interface import token_by_token
from dofla.integration.recorder import evaluation_mode
from dofla.integration.surgery import convert
from dofla.storage.files import replacing

sys.path.append(str(Path(__file__).parents[1] / "quality"))
from compressed import options_of, sources, window_alone

OURS = "dofla.compress"
CODED = {f"QuantizedCache, {bits} bits": bits for bits in (4, 2) if is_optimum_quanto_available()}
"""Where optimum-quanto, which codes them, is installed."""
RESIDUAL = 128
"""Tokens that a QuantizedCache, as it comes, gathers before it codes them together."""
CONSTANT, GROWS = "constant", "grows with the text"
SIZES = ("1.5MiB", "5.8MiB")
"""Of compressed caches."""
Make = Callable[[PreTrainedModel], PreTrainedModel]
Measure = Callable[[], Calibration]


def students(size: str | int, known: Measure, own: Measure | None, context: int | None = None) -> dict[str, Make]:
    """Name → what makes of a model one of constant memory."""
    options = {"size": size, "context": context, "retrieval_heads": 0}
    made = {
        OURS: lambda model: dofla.compress(model, calibration=known(), **options),
        "window and sinks, 8 bits": window_alone(size, None),
    }
    if own is not None:
        made["dofla.compress, own samples"] = lambda model: dofla.compress(model, calibration=own(), **options)
    return made


@torch.no_grad()
def judge_student(student: PreTrainedModel, window: Tensor) -> tuple[float, int]:
    """Loss of the last tokens of a window [1, L], after a prompt that is read in one call, and the bytes of the state
    after it. They are written token by token, as decoding does it."""
    cache, first = read_prompt(student, window)
    with token_by_token():
        loss = loss_of(student, cache, first, window)
    return loss, cache_bytes(cache)


@torch.no_grad()
def student_row(name: str, limit: int, student: PreTrainedModel, texts: dict[str, Tensor], kind: str = CONSTANT) -> Row:
    """A converted model on all windows; its bytes after the first prompt and at the end of any window."""
    with evaluation_mode(student):
        found = {text: [judge_student(student, window) for window in all_of[:, None]] for text, all_of in texts.items()}
        before = cache_bytes(read_prompt(student, next(iter(texts.values()))[:1])[0])
    most = max(held for judged in found.values() for _, held in judged)
    return Row(name, kind, limit, before, most, {text: [loss for loss, _ in found[text]] for text in texts})


@torch.no_grad()
def cache_rows(model: PreTrainedModel, texts: dict[str, Tensor]) -> Iterator[Row]:
    """The softmax cache, and transformers' way to keep it in fewer bits, from one reading of each prompt.

    A QuantizedCache is written in calls of as many tokens as it gathers: what a token sees, and when that is coded, is
    the same as token by token.
    """
    losses = {name: {text: [] for text in texts} for name in (SOFTMAX, *CODED)}
    for text, windows in texts.items():
        for window in windows[:, None]:
            cache, first = read_prompt(model, window)
            pairs = [(layer.keys, layer.values) for layer in cache.layers]
            for name, bits in CODED.items():
                coded = filled(pairs, QuantizedCache("quanto", model.config, nbits=bits))
                losses[name][text].append(loss_of(model, coded, first, window, chunk=RESIDUAL))
            losses[SOFTMAX][text].append(loss_of(model, cache, first, window))
    length, each = window.shape[1], token_bytes(model)
    yield Row(SOFTMAX, GROWS, 0, each * (length - WRITTEN), each * length, losses[SOFTMAX])
    for name, bits in CODED.items():
        before = coded_bytes(filled(pairs, QuantizedCache("quanto", model.config, nbits=bits)))
        full = before * (length - RESIDUAL) // (length - WRITTEN) + (RESIDUAL - 1) * each  # just before it codes
        yield Row(name, GROWS, 0, before, full, losses[name])


def coded_bytes(cache: Cache) -> int:
    """Of a QuantizedCache: codes, scales, offsets, and the tokens that are not coded yet."""
    kept = ("_quantized_keys", "_quantized_values", "keys", "values")
    return sum(bytes_of(getattr(layer, name) for name in kept) for layer in cache.layers)


def saved(students: list[str]) -> dict[str, str]:
    """Name → folder, of NAME=FOLDER."""
    if lacking := [each for each in students if not all(each.partition("="))]:
        raise typer.BadParameter(
            f"--student {lacking[0]!r}: give NAME=FOLDER, a name for the table and an adapter's folder"
        )
    return {name: folder for name, _, folder in (each.partition("=") for each in students)}


def limit_of(model: PreTrainedModel, size: str | int, context: int | None = None) -> int:
    """Bytes of the compressed cache."""
    convert(model, compressed_plan(Target.of(model, context), parse_size(size)))
    held = held_by(model)
    dofla.restore(model)
    return held


def nearest_limit(student: PreTrainedModel, limits: Collection[int]) -> int:
    """Of the limits, that nearest to the bytes of a student's state."""
    held = held_by(student)
    return min(limits, key=lambda limit: abs(limit - held))


def held_by(student: PreTrainedModel) -> int:
    """Bytes of a state."""
    return judge_student(student, torch.zeros(1, WRITTEN + 1, dtype=torch.int64))[1]


def write_texts(folder: Path, texts: dict[str, Tensor], limits: list[int]) -> None:
    """Windows [N, L] and the bytes that memories may take, for both environments; DoflaError if others are there."""
    path = folder / "tokens.safetensors"
    if path.exists():
        there, limits_there = read_texts(folder)
        if limits_there != limits or there.keys() != texts.keys() or any(not there[x].equal(texts[x]) for x in texts):
            raise DoflaError(f"{folder} was begun with other windows or sizes: choose another folder or remove it")
        return
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        save_file(
            {name: windows.contiguous() for name, windows in texts.items()}, partial, {LIMITS: json.dumps(limits)}
        )


def beyond(row: Row, other: Row, texts: Iterable[str]) -> tuple[float, list[float]]:
    """What a row loses more than another: the mean over those windows of ``texts`` that both have, and its interval."""
    pairs = [pair for text in texts for pair in zip(row.losses[text], other.losses[text], strict=False)]
    differences = torch.tensor([ours - theirs for ours, theirs in pairs], dtype=torch.float64)
    return differences.mean().item(), bootstrap_interval(differences, torch.ones_like(differences))


def gaps(row: Row, softmax: Row) -> dict[str, tuple[float, list[float]]]:
    """:func:`beyond` the original on each text, in its order."""
    return {text: beyond(row, softmax, [text]) for text in softmax.losses}


def merged(rows: dict[str, Row]) -> Table:
    """The table of all rows there are: by the bytes they may take, and then by what they lose."""

    def cell(figure: tuple[float, list[float]]) -> str:
        mean, (low, high) = figure
        return f"{mean:.3f} ({low:.3f} to {high:.3f})"

    softmax = rows[f"{SOFTMAX}, 0"]
    found = {name: gaps(row, softmax) for name, row in rows.items()}
    order = sorted(rows, key=lambda name: (rows[name].limit, sum(mean for mean, _ in found[name].values())))
    columns = ["memory", "its size", "after the prompt", "at the end", *softmax.losses, "mean", "perplexity", "windows"]
    shown = table(*columns, f"beyond {OURS}")
    for name in order:
        row = rows[name]
        ours, windows = rows.get(f"{OURS}, {row.limit}"), min(map(len, row.losses.values()))
        more = "" if ours in (None, row) else cell(beyond(row, ours, row.losses))
        held = size(row.prompt_bytes), size(row.end_bytes)
        mean = fmean(increase for increase, _ in found[name].values())
        cells = [*map(cell, found[name].values()), f"{mean:.3f}", perplexity(mean)]
        shown.add_row(row.memory, row.size, *held, *cells, str(windows), more)
    return shown


def main(
    model: Annotated[str, typer.Option(help="Folder or hub name of a causal model.")],
    calibrate: Annotated[Path, typer.Option(help="Text to measure directions on.")],
    out: Annotated[Path, typer.Option(help="Folder of the rows.")],
    text: Annotated[list[Path] | None, typer.Option(help="Texts to judge on; repeatable.")] = None,
    cache: Annotated[list[str] | None, typer.Option(help="Sizes; repeatable; default 1.5MiB, 5.8MiB.")] = None,
    length: Annotated[int, typer.Option(help="Tokens per window, of which the last 512 are judged.")] = 2048,
    longest: Annotated[int, typer.Option(help="Tokens of the windows whose ends these are.")] = 4096,
    windows: Annotated[int, typer.Option(help="Of each text, spread over it evenly.")] = 8,
    context: Annotated[int | None, typer.Option(help="Positions that dofla is for; default all there are.")] = None,
    student: Annotated[
        list[str] | None, typer.Option(help="NAME=FOLDER of an adapter of the model, one row more; repeatable.")
    ] = None,
    dofla_: Annotated[
        list[str] | None, typer.Option("--dofla", help="Options of dofla.compress, as evict=false; repeatable.")
    ] = None,
    own: Annotated[bool, typer.Option("--own", help="Measure on samples of the model's own as well.")] = False,
    kvpress: Annotated[Path | None, typer.Option(help="Python of an environment with kvpress.")] = None,
) -> None:
    if not WRITTEN < length <= longest:
        raise DoflaError(f"length {length}: give more than {WRITTEN} and at most {longest}, the longest")
    adapters, options = saved(student or []), {given: options_of(given) for given in dofla_ or []}
    teacher, tokenizer = load_model(model, dtype=torch.float32), AutoTokenizer.from_pretrained(model)
    texts = {}
    for name, where in sources(text or []).items():
        there = dofla.token_windows(where, tokenizer, length=longest, split="all").input_ids
        texts[name] = there[torch.linspace(0, len(there) - 1, windows).long(), -length:]
    limits = {each: limit_of(teacher, each, context) for each in cache or SIZES}
    write_texts(out, texts, list(limits.values()))
    there = read_rows(out)
    if f"{SOFTMAX}, 0" not in there:
        for row in cache_rows(teacher, texts):
            row.write(out)

    @lru_cache
    def calibrated(source: Path | str) -> Calibration:
        read = dofla.token_windows(source, tokenizer, model=teacher, **default_cut(context, longest))
        return dofla.calibrate(teacher, read, tokenizer=tokenizer, context=context)

    known, samples = partial(calibrated, calibrate), partial(calibrated, "self") if own else None
    for each, limit in limits.items():
        for name, make in students(each, known, samples, context).items():
            if f"{name}, {limit}" not in there:
                student_row(name, limit, make(teacher), texts).write(out)
                dofla.restore(teacher)
    for given, own_options in options.items():
        if f"dofla, {given}, 0" not in there:
            compressed = dofla.compress(teacher, calibration=known(), context=context, **own_options)
            student_row(f"dofla, {given}", 0, compressed, texts, GROWS).write(out)
            dofla.restore(teacher)
    for name, folder in adapters.items():
        if not any(row.memory == name for row in there.values()):
            adapter = dofla.load(folder, base_model=model, dtype=torch.float32)
            student_row(name, nearest_limit(adapter, limits.values()), adapter, texts).write(out)
    if kvpress:
        subprocess.run([kvpress, Path(__file__).parent / "presses.py", "--model", model, out], check=True)
    Console(width=220).print(merged(read_rows(out)))


if __name__ == "__main__":
    typer.run(main)
