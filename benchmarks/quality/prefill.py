"""Loss increase of the tokens after a prompt, by how the prompt is read into the cache: token by token, twice, or
exactly, in calls of several lengths.

    python benchmarks/quality/prefill.py --model models/smollm2-135m --calibrate data/english-train.txt.gz \\
        --text data/english-val.txt.gz --text data/stories-val.txt.gz --text data/books-val.txt.gz

Python source, the modules of the standard library of the interpreter that runs this, is always among the texts. The
tokens after the prompt are read token by token in all rows, as decoding does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from compressed import sources
from rich.console import Console
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, PreTrainedModel

import dofla
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
        read = dofla.token_windows(calibrate, tokenizer, length=512, windows=12)
        known = dofla.calibrate(original, read, tokenizer=tokenizer)
    right = {name: losses(original, rows, length) for name, rows in texts.items()}
    shown = table("prefill", *texts, "mean", gap=2)
    ways = [("sequential", length), *(("exact", n) for n in split or [512, 2048, 8192])]
    if not no_evict:
        ways.append(("twice", length))
    cache = {"evict": False} if no_evict else {"size": size, "retrieval_heads": 0}
    for way, tokens in ways:
        compressed = dofla.compress(original, calibration=known, tokenizer=tokenizer, prefill=way, **cache)
        found = [losses(compressed, rows, tokens) - right[name] for name, rows in texts.items()]
        means = [x.mean().item() for x in found]
        shown.add_row(f"{way}, {tokens}", *(f"{x:.4f}" for x in means), f"{sum(means) / len(means):.4f}")
        dofla.restore(compressed)
    Console(width=200).print(shown)


@torch.inference_mode()
def losses(model: PreTrainedModel, windows: Tensor, tokens: int) -> Tensor:
    """The loss of each window's last tokens after its prompt, which is read so many tokens at a time."""
    found = []
    with evaluation_mode(model):
        for window in windows:
            cache = DynamicCache(config=model.config)
            for part in window[None, :-WRITTEN].split(tokens, 1):
                model(part, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
            with token_by_token():
                logits = model(window[None, -WRITTEN:], use_cache=True, **{CACHE_ARGUMENT: cache}).logits[0, :-1]
            found.append(cross_entropy(logits.float(), window[1 - WRITTEN :]))
    return torch.stack(found)


if __name__ == "__main__":
    typer.run(main)
