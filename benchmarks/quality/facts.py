"""Facts that a cache finds again: some thirty are told among text, and told once more at its end; how many of those
are predicted, all tokens of the number right, by the original and by compressed caches.

    python benchmarks/quality/facts.py --model models/qwen2.5-coder-0.5b --length 4096 --text data/books-val.txt.gz \\
        --dofla size=3.1MiB,retrieval_heads=0 --dofla size=3.1MiB --dofla evict=false

A document enters a cache before it is asked for all of its facts, token by token. So this takes a thirtieth of the time
of benchmarks/peers/ruler.py, where a model writes its answers. ``--dofla`` has options of ``dofla.compress``, with
values as in YAML.
"""

from __future__ import annotations

from itertools import groupby
from typing import Annotated

import torch
import typer
from compressed import options_of
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import dofla
from dofla.data.facts import Facts
from dofla.display import size, table
from dofla.integration.cache import CACHE_ARGUMENT
from dofla.integration.converted import Converted
from dofla.integration.interface import token_by_token
from dofla.integration.recorder import evaluation_mode
from dofla.runs.opening import open_original
from dofla.serving.prompt_state import read_prompt


def main(
    model: Annotated[str, typer.Option(help="Folder or name of the model.")],
    text: Annotated[str, typer.Option(help="Text that the facts are told among.")],
    compress: Annotated[list[str], typer.Option("--dofla", help="Options of dofla.compress; repeatable.")],
    length: Annotated[int, typer.Option(help="Tokens of a document.")] = 4096,
    documents: Annotated[int, typer.Option(help="How many.")] = 1,
    calibration: Annotated[str | None, typer.Option(help="A calibration; default: a known one.")] = None,
    dtype: Annotated[str, typer.Option(help="Precision of the weights.")] = "float32",
    piece: Annotated[int, typer.Option(help="Tokens of a document that are read at once.")] = 4096,
) -> None:
    opened, tokenizer = open_original(model, dtype=dtype)
    facts = facts_among(text, tokenizer, length, documents)
    shown = table("cache", "bytes", "growing heads", "found", "of")
    shown.add_row("softmax", "", "", *map(str, facts_found(opened, facts, tokenizer, piece)))
    for given in compress:
        options = options_of(given)
        dofla.compress(opened, calibration=calibration, tokenizer=tokenizer, **options)
        plan = Converted.of(opened).plan
        held = size(plan.cache_bytes(length, opened.dtype))
        shown.add_row(given, held, str(plan.growing), *map(str, facts_found(opened, facts, tokenizer, piece)))
        dofla.restore(opened)
    Console(width=120).print(shown)


def facts_among(text: str, tokenizer: PreTrainedTokenizerBase, length: int, documents: int = 1) -> Facts:
    """Facts among a text, the same in every benchmark."""
    windows = dofla.token_windows(text, tokenizer, length=512, windows=-(-length // 512) * 4, split="all")
    return Facts.among(windows, tokenizer, length, documents, seed=11)


@torch.no_grad()
def facts_found(
    model: PreTrainedModel, facts: Facts, tokenizer: PreTrainedTokenizerBase, piece: int = 4096
) -> tuple[int, int]:
    """Facts whose number is predicted, and all."""
    found = count = 0
    for ids, told in zip(facts.documents.input_ids, facts.told, strict=True):
        with evaluation_mode(model):
            first = len(ids) - facts.asked - 1
            cache = read_prompt(model, ids[None, :first], chunk=piece)
            with token_by_token():
                hidden = model.base_model(ids[None, first:-1], use_cache=True, **{CACHE_ARGUMENT: cache})[0][0]
            right = model.get_output_embeddings()(hidden).argmax(-1) == ids[-facts.asked :]
        for _, places in groupby(range(facts.asked), lambda n, told=told: told[n, 0].item()):
            number = [n for n in places if any(x.isdigit() for x in tokenizer.decode([ids[n - facts.asked]]))]
            found, count = found + bool(right[number].all()), count + 1
    return found, count


if __name__ == "__main__":
    typer.run(main)
