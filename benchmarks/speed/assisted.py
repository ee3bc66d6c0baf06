"""Assisted decoding, with candidates from the prompt, beside decoding token by token: softmax attention and compressed
caches, on text that repeats what stands in the prompt and on text that goes on.

    python benchmarks/speed/assisted.py models/smollm2-135m --text data/books-val.txt.gz \\
        --text src/dofla/integration/interface.py

Of each text the first tokens are the prompt. Where it is to be repeated, the first quarter of them follows once more,
as when code is edited or a summary quotes. Tokens are written greedily, with up to ten candidates a pass. Shown are
tokens a second without the prompt's time, the better of two rounds; passes of the model for a token; and how many
tokens come before the first that differs from what is written without an assistant: rounding decides near ties.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from model import machine
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

import dofla
from dofla.data.documents import read_documents
from dofla.display import table
from dofla.runs.opening import open_original

LOOKUP = {"prompt_lookup_num_tokens": 10}


@dataclass
class Written:
    """Tokens that a model wrote, in how many passes and seconds."""

    tokens: Tensor
    passes: int
    seconds: float


def main(
    model: Annotated[str, typer.Argument(help="A folder or a name on the hub.")],
    text: Annotated[list[Path], typer.Option(help="Repeatable.")],
    size: Annotated[str, typer.Option(help="Of the compressed cache that evicts.")] = "1.5MiB",
    context: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 1024,
    new_tokens: Annotated[int, typer.Option(help="Tokens written.")] = 64,
    dtype: str = "bfloat16",
) -> None:
    transformers.logging.set_verbosity_error()
    print(", ".join(f"{key} {value}" for key, value in machine("cpu").items()))
    kinds = {"softmax": None, f"dofla, {size}": {"size": size}, "dofla, evict=False": {"evict": False}}
    prompts, shown = {}, table("prompt", "cache", "tokens/s", "assisted", "ratio", "passes a token", "alike", gap=2)
    for kind, options in kinds.items():
        opened, tokenizer = open_original(model, dtype=dtype)
        if options is not None:
            dofla.compress(opened, **options)
        for path in text:
            ids = tokenizer("\n".join(read_documents(path))[: 8 * context], return_tensors="pt").input_ids[:, :context]
            prompts = {"goes on": ids, "repeats": torch.cat([ids, ids[:, : context // 4]], 1)}
            for name, prompt in prompts.items():
                plain, assisted = (write(opened, prompt, new_tokens, own) for own in ({}, LOOKUP))
                same = (plain.tokens == assisted.tokens).int().cumprod(0).sum().item()
                speeds = [new_tokens / x.seconds for x in (plain, assisted)]
                ratio, passes = speeds[1] / speeds[0], assisted.passes / new_tokens
                shown.add_row(
                    f"{path.name}, {name}",
                    kind,
                    *(f"{x:.1f}" for x in speeds),
                    f"{ratio:.2f}",
                    f"{passes:.2f}",
                    f"{same} of {new_tokens}",
                )
    Console(width=120).print(shown)


@torch.inference_mode()
def write(model: PreTrainedModel, prompt: Tensor, tokens: int, options: dict) -> Written:
    """So many tokens and one more, whose pass also reads the prompt, and is not timed."""
    times: list[float] = []
    hook = model.register_forward_hook(lambda *_: times.append(time.perf_counter()))
    best = None
    for _ in range(2):
        times.clear()
        settings = {"max_new_tokens": tokens + 1, "min_new_tokens": tokens + 1, "do_sample": False}
        out = model.generate(prompt, **settings, **options)[0, prompt.shape[1] + 1 :]
        own = Written(out, len(times) - 1, times[-1] - times[0])
        best = own if best is None or own.seconds < best.seconds else best
    hook.remove()
    assert best is not None
    return best


if __name__ == "__main__":
    typer.run(main)
