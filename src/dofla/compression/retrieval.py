"""Retrieval heads: the few KV heads that needles are found with (Wu et al. 2024, arXiv 2404.15574).

They are ranked by the attention that they pay, where needles are asked for, to where these were told. With slots for
every token they find most of what the model finds.
"""

import logging
import math
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.data import TokenWindows
from dofla.data.facts import Facts
from dofla.errors import DoflaError
from dofla.integration.placement import placed_over
from dofla.integration.recorder import AttentionCall, recording, run_body

logger = logging.getLogger(__name__)

FAR = 4096
"""Tokens of a document with needles in it, if the model has so many positions and the text so many tokens."""
AUTO = "auto"
"""The word for the number of retrieval heads that :func:`count_of` finds."""
LEAST_ATTENTION, MOST_HEADS = 0.05, 0.25
"""Mean attention to needles from which on a head is a retrieval head, and the fraction of all heads that may be."""

Head = tuple[str, int]
"""The name of a layer, and a KV head of it."""


def needles_among(
    windows: TokenWindows, tokenizer: PreTrainedTokenizerBase | None, positions: int | None, needed: bool
) -> Facts | None:
    """The needles among text by which retrieval heads are found; None without a tokenizer. Where they cannot be
    written, with padding, too little text or few words of one token, DoflaError if ``needed``, or else None."""
    if tokenizer is None:
        return None
    try:
        return Facts.among(windows, tokenizer, min(FAR, positions or FAR))
    except DoflaError as error:
        if needed:
            raise
        logger.info("no retrieval heads: %s", error)
        return None


@torch.no_grad()
def rank_heads(
    model: PreTrainedModel, layers: Sequence[str], needles: Facts, report: Callable[[], None]
) -> dict[Head, float]:
    """All KV heads of these layers, those first of which a query head attends most to the needles that are asked for,
    with that: the mean over the tokens that ask of the attention to the needle's tokens. ``report`` is called after
    each layer of each document."""
    found: dict[Head, float] = {}
    told = needles.told[0]

    def look(call: AttentionCall) -> None:
        heads, length = call.key.shape[1:3]
        place, first = torch.arange(length, device=call.key.device), length - needles.asked
        attention = torch.zeros(call.query.shape[1], device=call.key.device)
        for rows in call.rows_from(first):
            start, end = told[rows.cpu() - first].to(call.key.device).T.unsqueeze(-1)
            there = (start <= place) & (place < end)
            attention += (call.log_weights(rows).exp() * there).sum((0, 2, 3))
        best = (attention / needles.asked).view(heads, -1).amax(1).tolist()
        for head, mean in enumerate(best):
            found[call.name, head] = found.get((call.name, head), 0.0) + mean
        report()

    with recording(model, layers, look):
        for done, batch in enumerate(placed_over(needles.documents, 1, None), 1):
            told = needles.told[done - 1]
            run_body(model, batch)
    return {head: found[head] / done for head in sorted(found, key=lambda head: (-found[head], head))}


def count_of(attention: Sequence[float]) -> int:
    """The retrieval heads, of heads that are ranked by their ``attention`` to needles: those that pay enough, and no
    more than a part of all."""
    return sum(own >= LEAST_ATTENTION for own in attention[: math.ceil(MOST_HEADS * len(attention))])


def by_layer(heads: Sequence[Head]) -> dict[str, list[int]]:
    """Heads by the name of their layer, in order."""
    found: dict[str, list[int]] = {}
    for name, head in sorted(heads, key=lambda own: own[1]):
        found.setdefault(name, []).append(head)
    return found
