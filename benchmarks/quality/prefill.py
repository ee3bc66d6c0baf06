"""Loss increase of the tokens after a prompt, by how the prompt is read into the cache: token by token, by default,
twice, or exactly, in calls of several lengths; and the time of the prompt over softmax attention's.

    python benchmarks/quality/prefill.py --model models/smollm2-135m --calibrate data/english-train.txt.gz \\
        --text data/english-val.txt.gz --text data/stories-val.txt.gz --text data/books-val.txt.gz

Python source, the modules of the standard library of the interpreter that runs this, is always among the texts. The
tokens after the prompt are read token by token in all rows, as decoding does.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated

import torch
import typer
from compressed import sources
from rich.console import Console
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, PreTrainedModel

import dofla
from dofla.compression.directions import default_cut
from dofla.display import table
from dofla.integration.cache import CACHE_ARGUMENT
from dofla.integration.interface import token_by_token
from dofla.integration.recorder import evaluation_mode
from dofla.runs.opening import open_original

WRITTEN = 512
"""Tokens after the prompt."""


def main(
    model: Annotated[str, typer.Option(help="Folder or hub name of a causal model.")],
    calibrate: Annotated[str | None, typer.Option(help="Calibration text; default the calibration known.")] = None,
    text: Annotated[list[Path] | None, typer.Option(help="Texts to evaluate on; repeatable.")] = None,
    size: Annotated[str, typer.Option(help="Of the compressed cache.")] = "1.5MiB",
    no_evict: Annotated[bool, typer.Option("--no-evict", help="A cache that holds every token instead.")] = False,
    calibration: Annotated[Path | None, typer.Option(help="Saved calibration.")] = None,
    length: Annotated[int, typer.Option(help=f"Tokens per window, of which {WRITTEN} come after the prompt.")] = 2048,
    windows: Annotated[int, typer.Option(help="Windows of each text, spread over it evenly.")] = 4,
    split: Annotated[list[int] | None, typer.Option(help="Tokens per exact call; default 512, 2048, 8192.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Default the checkpoint's, where that is not slow.")] = None,
) -> None:
    original, tokenizer = open_original(model, dtype)
    texts = {}
    for name, where in sources(text or []).items():
        there = dofla.token_windows(where, tokenizer, length=length, split="all").input_ids
        texts[name] = there[torch.linspace(0, len(there) - 1, windows).long()]
    known: dofla.Calibration | Path | None = calibration
    if calibrate and calibration is None:
        read = dofla.token_windows(calibrate, tokenizer, **default_cut())
        known = dofla.calibrate(original, read, tokenizer=tokenizer)
    right, softmax = measured(original, texts, length)
    shown = table("prefill", *texts, "mean", "time", gap=2)
    ways = [("sequential", length), *(("exact", n) for n in split or [512, 2048, 8192])]
    if not no_evict:
        ways.append(("twice", length))
    cache = {"evict": False} if no_evict else {"size": size, "retrieval_heads": 0}
    for way, tokens in ways:
        compressed = dofla.compress(original, calibration=known, tokenizer=tokenizer, prefill=way, **cache)
        found, seconds = measured(compressed, texts, tokens)
        means = [(losses - right[name]).mean().item() for name, losses in found.items()]
        mean, time = sum(means) / len(means), f"{seconds / softmax:.2f} x"
        shown.add_row(f"{way}, {tokens}", *(f"{x:.4f}" for x in means), f"{mean:.4f}", time)
        dofla.restore(compressed)
    Console(width=200).print(shown)


@torch.inference_mode()
def measured(model: PreTrainedModel, texts: dict[str, Tensor], tokens: int) -> tuple[dict[str, Tensor], float]:
    """The loss of each window's last tokens after its prompt, which is read so many tokens at a time, by text; and the
    seconds of a prompt, in the median."""
    found, times = {name: torch.empty(len(windows)) for name, windows in texts.items()}, []
    with evaluation_mode(model):
        for name, windows in texts.items():
            for n, window in enumerate(windows):
                begun, cache = perf_counter(), DynamicCache(config=model.config)
                for part in window[None, :-WRITTEN].split(tokens, 1):
                    model(part, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
                times.append(perf_counter() - begun)
                with token_by_token():
                    logits = model(window[None, -WRITTEN:], use_cache=True, **{CACHE_ARGUMENT: cache}).logits[0, :-1]
                found[name][n] = cross_entropy(logits.float(), window[1 - WRITTEN :])
    return found, median(times)


if __name__ == "__main__":
    typer.run(main)
