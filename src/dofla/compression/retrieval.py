"""Retrieval heads: the few KV heads that needles are found with (Wu et al. 2024, arXiv 2404.15574).

They are ranked by the attention that they pay, where needles are asked for, to where these were told. With slots for
every token they find most of what the model finds.
"""

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.data import TokenWindows
from dofla.data.facts import PER_FACT, Facts, one_token_words
from dofla.errors import DoflaError
from dofla.integration.placement import placed_over
from dofla.integration.recorder import AttentionCall, recording, run_body

FAR = 4096
"""Tokens of a document with needles in it, if the model has so many positions and the text so many tokens."""
_ROWS_AT_A_TIME = 64

Head = tuple[str, int]
"""The name of a layer, and a KV head of it."""


def needles_among(windows: TokenWindows, tokenizer: PreTrainedTokenizerBase, positions: int | None) -> Facts:
    """The needles among text by which retrieval heads are found; DoflaError as :meth:`Facts.among`."""
    return Facts.among(windows, tokenizer, min(FAR, positions or FAR))


def has_words(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """True if needles can be written with a tokenizer: not all vocabularies say where words begin."""
    return tokenizer is not None and len(one_token_words(tokenizer)) * PER_FACT >= FAR


@torch.no_grad()
def rank_heads(model: PreTrainedModel, layers: Sequence[str], needles: Facts, report: Callable[[], None]) -> list[Head]:
    """All KV heads of these layers, those first of which a query head attends most to the needles that are asked for:
    the mean over the tokens that ask of the attention to the needle's tokens. ``report`` is called after each layer of
    each document."""
    found: dict[Head, float] = {}
    told = needles.told[0]

    def look(call: AttentionCall) -> None:
        heads, length = call.key.shape[1:3]
        place, first = torch.arange(length, device=call.key.device), length - needles.asked
        attention = torch.zeros(call.query.shape[1], device=call.key.device)
        for rows in torch.arange(first, length, device=call.key.device).split(_ROWS_AT_A_TIME):
            start, end = told[rows.cpu() - first].to(call.key.device).T.unsqueeze(-1)
            there = (start <= place) & (place < end)
            attention += (call.log_weights(rows).exp() * there).sum((0, 2, 3))
        best = (attention / needles.asked).view(heads, -1).amax(1).tolist()
        for head, mean in enumerate(best):
            found[call.name, head] = found.get((call.name, head), 0.0) + mean
        report()

    with recording(model, layers, look):
        for done, batch in enumerate(placed_over(needles.documents, 1, None)):
            told = needles.told[done]
            run_body(model, batch)
    return sorted(found, key=lambda head: (-found[head], head))


def check_retrieval_heads(count: int, total: int, known: bool) -> None:
    """DoflaError unless so many of the ``total`` KV heads can hold every token: fewer than none, more than all, or
    heads that are neither ranked nor can be, without a tokenizer."""
    if not isinstance(count, int) or count < 0:
        raise DoflaError(f"retrieval_heads is {count!r}: give how many KV heads are to hold every token, or 0")
    if count > total:
        raise DoflaError(f"retrieval_heads is {count}: the model has {total} KV heads")
    if count and not known:
        raise DoflaError(f"retrieval_heads is {count}: give the tokenizer too, which writes needles into the text")


def by_layer(heads: Sequence[Head]) -> dict[str, list[int]]:
    """Heads by the name of their layer, in order."""
    found: dict[str, list[int]] = {}
    for name, head in sorted(heads, key=lambda own: own[1]):
        found.setdefault(name, []).append(head)
    return found
