"""By which figure of a few windows should `dofla frontier` choose the size of a state, that its target holds on others?

    python benchmarks/quality/choosing.py --model models/smollm2-135m --calibrate data/english-train.txt.gz \\
        --text data/english-val.txt.gz --text data/books-val.txt.gz \\
        --text data/stories-val.txt.gz --out choosing.json

Compressed models of four sizes read windows of all texts; Python source, the modules of the standard library, is always
among them. Then many times, of a few windows of the first text, drawn by chance, the smallest state within the target
is found, by a power law between the sizes: where the loss increase is within it, the upper end of the loss increase's
interval, or both loss increase and KL. Printed is that state, 5th to 95th percentile, and beside each text, with what
it then loses in the mean, how often that is more than 1.3 times the target. With --rows the windows are taken from a
file of --out, not read again.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated, Any

import typer
from compressed import sources
from rich.console import Console

import dofla
from dofla.data import TokenWindows
from dofla.display import size, table
from dofla.evaluation.language import next_token_figures
from dofla.integration.converted import Converted
from dofla.integration.recorder import evaluation_mode
from dofla.runs.opening import open_original
from dofla.storage.files import read_json, write_json

SIZES = ("750KiB", "1.5MiB", "3MiB", "6MiB")
WINDOWS = {512: (12, 36, 18), 2048: (6, 18, 6)}
"""By length: that choose, of the first text that they are drawn from, of each other text."""
DRAWS, EXCESS = 200, 1.3

Rule = Callable[[Sequence[float], Sequence[float]], float]
RULES: dict[str, Rule] = {
    "loss increase": lambda gaps, _: fmean(gaps),
    "upper end": lambda gaps, _: fmean(gaps) + 1.96 * pstdev(gaps) / math.sqrt(len(gaps)),
    "loss increase and KL": lambda gaps, kls: max(fmean(gaps), fmean(kls)),
}


def main(
    model: Annotated[str, typer.Option(help="Folder or hub name of a causal model.")],
    calibrate: Annotated[str, typer.Option(help="Text that students are made from.")],
    text: Annotated[list[Path], typer.Option(help="Texts to judge on; repeatable; the first chooses.")],
    target: Annotated[float, typer.Option(help="Nats per token.")] = 0.02,
    rows: Annotated[Path | None, typer.Option(help="What --out has written before.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    texts = sources(text)
    known = read_json(rows, "rows")["rows"] if rows else _measured(model, calibrate, texts)
    if out is not None:
        write_json(out, {"rows": known})
    found: dict[tuple[str, int], dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in known:
        found[row["text"], row["length"]][row["bytes"]].append((row["loss_increase"], row["kl"]))
    shown, generator, first = table("tokens, by", "state", *texts, gap=2), random.Random(0), next(iter(texts))
    for length, (few, *_) in WINDOWS.items():
        chosen = defaultdict(list)
        own = found[first, length]
        for _ in range(DRAWS):
            drawn = generator.sample(range(len(next(iter(own.values())))), few)
            for name, rule in RULES.items():
                curve = {held: rule(*zip(*(own[held][n] for n in drawn), strict=True)) for held in own}
                chosen[name].append(_smallest(curve, target))
        for name, states in chosen.items():
            states.sort()
            ends = [size(states[round(part * (DRAWS - 1))]) for part in (0.05, 0.95)]
            cells = []
            for kind in texts:
                curve = {held: fmean(gap for gap, _ in own) for held, own in found[kind, length].items()}
                lost = [_at(curve, held) for held in states]
                more = fmean(loss > EXCESS * target for loss in lost)
                cells.append(f"{fmean(lost):.4f}, {more:.0%}")
            shown.add_row(f"{length}, {name}", " to ".join(ends), *cells)
    Console(width=200).print(shown)


def _measured(model: str, calibrate: str, texts: dict[str, Any]) -> list[dict[str, Any]]:
    teacher, tokenizer, rows = *open_original(model), []
    made_from = dofla.token_windows(calibrate, tokenizer, length=512, windows=12)
    for each in SIZES:
        student = dofla.compress(teacher, made_from, each, retrieval_heads=0)
        held = Converted.of(student).plan.state_bytes(teacher.dtype)
        for length, (_, pool, others) in WINDOWS.items():
            for n, (kind, where) in enumerate(texts.items()):
                count = others if n else pool
                for ids in dofla.token_windows(where, tokenizer, length=length, windows=count, split="all").input_ids:
                    with evaluation_mode(student):
                        figures = next_token_figures(student, TokenWindows(ids[None]))
                    known = {"loss_increase": figures["loss_increase"], "kl": figures["kl"]}
                    rows.append({"text": kind, "length": length, "size": each, "bytes": held, **known})
        dofla.restore(teacher)
    return rows


def _smallest(curve: dict[int, float], target: float) -> float:
    """Bytes from which on all are within the target; those of the largest that is there if none is."""
    held = sorted(curve)
    first = next((n + 1 for n in reversed(range(len(held))) if curve[held[n]] > target), 0)
    if first in (0, len(held)):
        return held[min(first, len(held) - 1)]
    low, high = held[first - 1], held[first]
    part = math.log(curve[low] / target) / math.log(curve[low] / max(curve[high], target / 100))
    return low * (high / low) ** part


def _at(curve: dict[int, float], held: float) -> float:
    """Loss at so many bytes, by power laws."""
    sizes = sorted(curve)
    n = next(n for n in range(len(sizes) - 1) if held <= sizes[n + 1])
    low, high = (max(curve[x], 1e-4) for x in sizes[n : n + 2])
    return low * (high / low) ** (math.log(held / sizes[n]) / math.log(sizes[n + 1] / sizes[n]))


if __name__ == "__main__":
    typer.run(main)
