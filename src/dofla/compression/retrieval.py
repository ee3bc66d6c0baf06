"""Retrieval heads: the few KV heads that needles are found with (Wu et al. 2024, arXiv 2404.15574).

They are ranked by what their eviction costs where needles stand far back. With slots for every token they find most of
what the model finds; what the others then evict costs text more.
"""

from collections.abc import Callable, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from dofla.compression.eviction_cost import eviction_costs
from dofla.data import TokenWindows
from dofla.data.facts import Facts
from dofla.errors import DoflaError
from dofla.integration.converted import Converted
from dofla.integration.placement import placed_over

FAR = 4096
"""Tokens of a document with needles in it, if the model has so many positions and the text so many tokens."""

Head = tuple[str, int]
"""The name of a layer, and a KV head of it."""


def needles_among(windows: TokenWindows, tokenizer: PreTrainedTokenizerBase, positions: int | None) -> Facts:
    """The needles among text by which retrieval heads are found; DoflaError as :meth:`Facts.among`."""
    return Facts.among(windows, tokenizer, min(FAR, positions or FAR))


def rank_heads(
    compressed: Converted,
    shares: Mapping[str, Sequence[float]],
    text_costs: Mapping[str, Sequence[float]],
    needles: Facts,
    report: Callable[[], None],
) -> list[Head]:
    """All KV heads, those first on which most hangs.

    What eviction costs in a head where needles are asked for, as it would be at an even split (cost times share), is
    set beside what it costs on text: of either, its part of what all cost. Costs, and the ``shares`` of the bytes that
    the model is compressed with, are by layer and KV head; ``report`` is called after each document.
    """
    found = eviction_costs(compressed, list(placed_over(needles.documents, 1, None)), report, needles.asked)
    heads = [(name, head) for name, own in shares.items() for head in range(len(own))]
    text = [text_costs[name][head] for name, head in heads]
    asked = [found[name][head].item() * shares[name][head] for name, head in heads]
    parts = [sum(both) for both in zip(_parts(text), _parts(asked), strict=True)]
    return [head for _, head in sorted(zip(parts, heads, strict=True), reverse=True)]


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


def _parts(costs: Sequence[float]) -> list[float]:
    """Each as a part of what all cost that cost anything."""
    total = sum(max(cost, 0.0) for cost in costs)
    return [cost / total if total else 0.0 for cost in costs]
