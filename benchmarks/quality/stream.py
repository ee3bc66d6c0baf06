"""One stream of text, far longer than the model has positions: loss of a student by block of it, and its bytes.

    python benchmarks/quality/stream.py docs/students/smollm2-135m-compressed --base-model models/smollm2-135m \\
        --text data/books-val.txt.gz

Text is not equally hard everywhere, so beside the student stands its original on the same tokens, each of them read
with the ``--context`` tokens before it, or half as many at least: the loss increase between the two is what is to stay
as it is. Loss increases are means over a block with an interval of 95 % by bootstrap over its pieces of 500 tokens, in
nats per token; the change is against the first block. Bytes are the most that was held in a block, of one sequence.
``--way``:

- on: one state, positions going on past those that the model has;
- wrapped: one state, positions beginning anew at 0 when they are used up;
- again: when positions are used up, a new state, into which the last ``--overlap`` tokens are read again, as
  dofla.serving.Stream does.

With --out all losses by piece are written as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel

import dofla
from dofla.display import size, table
from dofla.errors import DoflaError
from dofla.evaluation.language import bootstrap_interval
from dofla.integration.cache import CACHE_ARGUMENT, cache_bytes
from dofla.integration.interface import token_by_token
from dofla.integration.recorder import evaluation_mode
from dofla.storage.files import write_json

PIECE = 500
"""Tokens read in one call, which are also those that intervals resample."""
Read = Iterator[tuple[Tensor, int]]
"""Of each piece: the loss of every next token, and the bytes of the cache after it."""


def loss(logits: Tensor, ids: Tensor, first: int) -> Tensor:
    """Of each next token after the piece of a stream [T + 1] that begins at ``first``; ``logits`` [PIECE, V] of it."""
    return cross_entropy(logits.float(), ids[first + 1 : first + PIECE + 1], reduction="none")


def going_on(model: PreTrainedModel, ids: Tensor, positions: int, overlap: int, *, wrapped: bool = False) -> Read:
    """One state for the whole stream."""
    cache = DynamicCache(config=model.config)
    for first in range(0, len(ids) - 1, PIECE):
        places = torch.arange(first, first + PIECE) % (positions if wrapped else len(ids))
        piece = ids[None, first : first + PIECE]
        logits = model(piece, position_ids=places[None], **{CACHE_ARGUMENT: cache}).logits[0]
        yield loss(logits, ids, first), cache_bytes(cache)


def wrapping(model: PreTrainedModel, ids: Tensor, positions: int, overlap: int) -> Read:
    """:func:`going_on` at positions that begin anew."""
    return going_on(model, ids, positions, overlap, wrapped=True)


def beginning_again(model: PreTrainedModel, ids: Tensor, positions: int, overlap: int) -> Read:
    """A new state when positions are used up: :class:`dofla.serving.Stream`."""
    stream = dofla.serving.Stream(model, overlap, positions)
    for first in range(0, len(ids) - 1, PIECE):
        logits = stream.read(ids[None, first : first + PIECE])[0]
        yield loss(logits, ids, first), cache_bytes(stream.cache)


WAYS: dict[str, Callable[[PreTrainedModel, Tensor, int, int], Read]] = {
    "on": going_on,
    "wrapped": wrapping,
    "again": beginning_again,
}


def original(model: PreTrainedModel, ids: Tensor, context: int) -> Tensor:
    """Losses [T] of the softmax model, each token read with ``context`` others before it, or half as many at least."""
    found, stride = [], context // 2
    with dofla.original(model):
        for first in range(0, len(ids) - 1, stride):
            before = max(0, first - stride)
            logits = model(ids[None, before : first + stride], use_cache=False).logits[0, first - before :]
            targets = ids[first + 1 : first + stride + 1]
            found.append(cross_entropy(logits[: len(targets)].float(), targets, reduction="none"))
    return torch.cat(found)


@dataclass
class Way:
    """What was found on one way: the mean loss of each piece, and the bytes after it."""

    losses: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)

    def gaps(self, teacher: Tensor, block: int) -> Tensor:
        """Of the pieces of each block [blocks, pieces]."""
        return (torch.tensor(self.losses, dtype=torch.float64) - teacher).view(-1, block // PIECE)


def interval(values: Tensor) -> str:
    """Mean and its interval."""
    low, high = bootstrap_interval(values, torch.ones_like(values))
    return f"{values.mean():.3f} ({low:.3f} to {high:.3f})"


@torch.inference_mode()
@token_by_token()
def main(
    student: Annotated[str, typer.Argument(help="Folder of an adapter or a standalone student.")],
    text: Annotated[Path, typer.Option(help="One long text; its documents are read one after the other.")],
    base_model: Annotated[str | None, typer.Option(help="Of an adapter, if it is not where that says.")] = None,
    tokens: Annotated[int, typer.Option(help="Of the stream.")] = 100_000,
    block: Annotated[int, typer.Option(help="Tokens of a row.")] = 10_000,
    way: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(WAYS)}; repeatable; default all.")] = None,
    overlap: Annotated[int, typer.Option(help="Tokens read again into a new state.")] = 2048,
    context: Annotated[int, typer.Option(help="Tokens that the original sees before each, at most.")] = 2048,
    positions: Annotated[int | None, typer.Option(help="After which they are used up; default all there are.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    names = way or list(WAYS)
    if unknown := set(names) - WAYS.keys():
        raise typer.BadParameter(f"no way is called {min(unknown)!r}: choose of {', '.join(WAYS)}")
    if block % PIECE or tokens % block or min(block, tokens) < 1:
        raise typer.BadParameter(f"tokens {tokens}, block {block}: give whole blocks of a multiple of {PIECE} tokens")
    model = dofla.load(student, base_model=base_model)
    positions = positions or model.config.get_text_config().max_position_embeddings
    if not 0 < overlap <= positions - PIECE:  # so that a piece is read in one call
        raise typer.BadParameter(f"overlap {overlap}: give 1 to {positions - PIECE}, with {positions} positions")
    tokenizer = AutoTokenizer.from_pretrained(base_model or student)
    there = dofla.token_windows(text, tokenizer, length=tokens + 1, windows=1, split="all").input_ids
    if not len(there):
        raise DoflaError(f"{text} has fewer than {tokens + 1} tokens: give a longer text, or ask for fewer --tokens")
    ids, console, found = there[0], Console(width=160), {}
    with evaluation_mode(model):
        teacher = original(model, ids, context).double().view(-1, PIECE).mean(dim=1)
        for name in names:
            found[name] = Way()
            for piece, held in WAYS[name](model, ids, positions, overlap):
                found[name].losses.append(piece.double().mean().item())
                found[name].bytes.append(held)
            console.print(f"{name}: read", style="dim")
            if out is not None:
                ways = {each: {"losses": x.losses, "bytes": x.bytes} for each, x in found.items()}
                write_json(out, {"piece": PIECE, "block": block, "teacher": teacher.tolist(), "ways": ways})
    console.print(summary(found, teacher, block))


def summary(found: dict[str, Way], teacher: Tensor, block: int) -> Table:
    """A row of each way and block."""
    shown = table(
        "way", "tokens", "original", "student", "loss_increase", "change of the loss increase", "state", gap=2
    )
    for name, each in found.items():
        gaps = each.gaps(teacher, block)
        for n, own in enumerate(gaps):
            pieces = slice(n * block // PIECE, (n + 1) * block // PIECE)
            loss = teacher[pieces].mean()
            cells = f"{loss:.3f}", f"{loss + own.mean():.3f}", interval(own), f"{own.mean() - gaps[0].mean():+.3f}"
            state = size(max(each.bytes[pieces]))
            shown.add_row("" if n else name, f"{n * block:,} to {(n + 1) * block:,}", *cells, state)
    return shown


if __name__ == "__main__":
    typer.run(main)
