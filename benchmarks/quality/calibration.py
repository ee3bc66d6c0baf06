"""What a calibration takes, and what its head budgets are worth: time, peak memory, size of the file, and KL on several
kinds of text beside that of budgets by eviction alone, without a second reading, and of even ones; with ``--facts``,
how many facts told among that text are found again (facts.py), too.

    python benchmarks/quality/calibration.py --model models/smollm2-135m --size 1.5MiB --length 2048 --windows 2 \\
        --text data/english-val.txt.gz --text data/stories-val.txt.gz --text data/books-val.txt.gz
    python benchmarks/quality/calibration.py ... --facts data/books-val.txt.gz
    python benchmarks/quality/calibration.py ... --calibrate sample --calibrate self --calibrate data/books-train.txt.gz
    python benchmarks/quality/calibration.py ... --train data/books-train.txt.gz

``--train`` trains all weights on a text first, and compares the calibration of the model before that, which
``calibration="base"`` is.

Python source, the modules of the standard library of the interpreter that runs this, is always among the texts. Peak
memory is what the process takes beyond the weights while it calibrates, on Linux.
"""

from __future__ import annotations

import ctypes
import gc
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated

import torch
import typer
from facts import facts_among, facts_found
from key_quantization import texts_of
from rich.console import Console
from transformers import PreTrainedModel

import dofla
from dofla.compression.calibration import Calibration
from dofla.compression.compress import TEXT
from dofla.compression.directions import default_cut
from dofla.compression.head_budgets import divide, with_reading
from dofla.compression.plan import even_bytes
from dofla.compression.size import parse_size
from dofla.compression.target import Target
from dofla.display import size as in_bytes
from dofla.display import table
from dofla.evaluation.language import next_token_figures
from dofla.integration.positions import positions_of
from dofla.runs.opening import open_original


def main(
    model: Annotated[str, typer.Option(help="Folder or name of the model.")],
    size: Annotated[str, typer.Option(help="Size of the compressed cache.")],
    text: Annotated[list[str], typer.Option(help="Text to evaluate on; repeatable.")],
    calibrate: Annotated[list[str] | None, typer.Option(help="Text to calibrate on; repeatable.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 2048,
    windows: Annotated[int, typer.Option(help="Windows of each text.")] = 2,
    facts: Annotated[str | None, typer.Option(help="Text that facts are told among.")] = None,
    documents: Annotated[int, typer.Option(help="With facts in them.")] = 2,
    train: Annotated[str | None, typer.Option(help="Text to train the weights on first.")] = None,
    steps: Annotated[int, typer.Option(help="Of training, one window of 512 tokens each.")] = 100,
    dtype: Annotated[str, typer.Option(help="Precision of the weights.")] = "float32",
) -> None:
    opened, tokenizer = open_original(model, dtype=dtype)
    texts = texts_of([*map(Path, text)], tokenizer, length, windows)
    told = None if facts is None else facts_among(facts, tokenizer, length, documents)
    found_by_all = "" if told is None else "facts, of {1}; softmax {0}".format(*facts_found(opened, told, tokenizer))
    shown = table("calibrated on", "seconds", "CPU s", "memory", "file", "budgets", *texts, "mean", found_by_all)
    even = even_bytes(Target.of(opened).compressed, parse_size(size))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calibration.safetensors"

        def measured(source: str) -> tuple[Calibration, list[str]]:
            cut = default_cut(positions_of(opened))
            read = dofla.token_windows(source, tokenizer, model=opened, progress=False, **cut)
            forget_peak()
            before, started, spent = memory("VmRSS"), time.perf_counter(), time.process_time()
            found = dofla.calibrate(opened, read, tokenizer=tokenizer, progress=False)
            seconds, cpu, peak = time.perf_counter() - started, time.process_time() - spent, memory("VmHWM") - before
            found.save(path)
            return found, [f"{seconds:.0f}", f"{cpu:.0f}", in_bytes(peak), in_bytes(path.stat().st_size)]

        def show(name: str, found: Calibration, figures: list[str]) -> None:
            by_eviction = divide(even, found.costs)
            ways = {"reading": with_reading(even, by_eviction, found.reading), "eviction": by_eviction, "even": {}}
            for way, shares in ways.items():
                dofla.compress(opened, size=size, calibration=replace(found, shares=shares), retrieval_heads=0)
                divergences = [next_token_figures(opened, own)["kl"] for own in texts.values()]
                again = "" if told is None else str(facts_found(opened, told, tokenizer)[0])
                dofla.restore(opened)
                columns = [*(f"{kl:.4f}" for kl in (*divergences, fmean(divergences))), again]
                shown.add_row(*([name, *figures] if way == "reading" else [""] * 5), way, *columns)

        if train is not None:
            base = measured(TEXT)
            read = dofla.token_windows(train, tokenizer, length=512, windows=steps, split="all")
            change = _trained(opened, read)
            show(f"{TEXT}, before training ({change:+.3f} nats on the text)", *base)
        for source in calibrate or [TEXT]:
            show(source, *measured(source))
    Console(width=160).print(shown)


def _trained(model: PreTrainedModel, windows: dofla.TokenWindows) -> float:
    """Train all weights, one step a window; by how much the loss of the last windows is below that of the first."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-5, weight_decay=0.0), []
    for row in windows.input_ids:
        loss = model(row[None], labels=row[None], use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    tenth = max(1, len(losses) // 10)
    return fmean(losses[-tenth:]) - fmean(losses[:tenth])


def memory(which: str) -> int:
    """Bytes of the process: VmRSS now, or VmHWM at most."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(which))


def forget_peak() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free but kept would be used unseen
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
