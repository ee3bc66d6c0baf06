"""The plan of a compressed cache: how many tokens of each kind every KV head gets for a size in bytes."""

import math
from collections.abc import Collection
from typing import Any

from dofla.attention import HeadSizes, tier_bytes
from dofla.compression.head_budgets import HeadBudgets
from dofla.compression.size import in_bytes
from dofla.compression.target import Target
from dofla.errors import DoflaError
from dofla.feature_maps.cost import HeadCost
from dofla.integration.sites import AttentionSite
from dofla.plans.layers import CompressedLayer, LayerPlan, SoftmaxLayer, alike, head_bytes
from dofla.plans.plan import Plan

STRATEGY = "compressed"
"""Name of the strategy in plans."""
WINDOW_SHARE, NEWEST_SHARE = 0.24, 0.2
"""Fractions of a head's bytes: the local window in int8, and tokens of the tier that are retained for their age."""
SINKS = 2
BITS = 3.0
"""Bits per number in the tier. On SmolLM2 at 1.5 MiB (``docs/research/cache.md``)."""


class TooSmall(DoflaError):
    """A size without room for a token of each kind."""


def compressed_plan(
    target: Target,
    size: int,
    *,
    head_budgets: HeadBudgets | None = None,
    prefill: str = "auto",
) -> Plan:
    """The plan of :func:`dofla.compress` for a cache of ``size`` bytes; DoflaError as there.

    Head budgets are by default an even split, in proportion to the size of a token. Bytes that a head cannot fill go to
    the others, and then to int8.
    """
    sites, positions = target.compressed, target.length
    even = even_bytes(sites, size)
    if head_budgets is not None and head_budgets.full_heads and positions is None:
        raise DoflaError(f"{target.kind} states no number of positions: give context, which retrieval heads hold")
    if head_budgets is not None and positions is not None:
        most = {x.name: bytes_for(positions, x.head_dim, x.value_dim) / even[x.name] for x in sites}
        head_budgets = head_budgets.at_most(most, even)
    layers: list[LayerPlan] = []
    for site in target.sites.values():
        shape = site.name, site.kv_heads, site.head_dim, site.value_dim
        if site.name not in even:
            if not site.linear_time or site.name in target.keep_softmax:
                layers.append(SoftmaxLayer(*shape))
            continue
        budgets = head_budgets.of_layer(site.name, site.kv_heads) if head_budgets else [1.0] * site.kv_heads
        dims = site.head_dim, site.value_dim
        try:
            sizes = [head_sizes(math.floor(share * even[site.name] + 1e-6), *dims, positions) for share in budgets]
        except TooSmall:
            least = min(budgets) if head_budgets is None else head_budgets.least
            needed = in_bytes(smallest_size(sites, min(1.0, least)))
            raise TooSmall(
                f"size {in_bytes(size)} is too small for a token of each kind in every KV head: give {needed} or more"
            ) from None
        window, sinks, newest, heavy_hitters = (alike(each) for each in zip(*sizes, strict=True))
        layers.append(CompressedLayer(*shape, window, sinks, newest, heavy_hitters, BITS))
    made_by: dict[str, Any] = {"strategy": STRATEGY, "size": size}
    if head_budgets is not None:
        made_by |= head_budgets.record()
    return Plan(layers, target.name, made_by, target.context, prefill)


def head_sizes(total: int, head_dim: int, value_dim: int, most: int | None = None) -> HeadSizes:
    """Tokens of a KV head that take at most ``total`` bytes. No text has more than ``most`` tokens: bytes beyond those
    of so many go to int8. TooSmall if there is no room for a token of each kind."""
    token, coded = HeadCost.of(head_dim, value_dim, 0, "int8").token, tier_bytes(head_dim, value_dim, BITS)
    window, newest = round(WINDOW_SHARE * total / token), round(NEWEST_SHARE * total / coded)
    heavy_hitters = (total - (window + SINKS) * token) // coded - newest
    if min(window, newest, heavy_hitters) < 1:
        raise TooSmall(f"{total} bytes are too few for a token of each kind")
    if most is not None and window + SINKS + newest + heavy_hitters > most:
        held = max(most - SINKS, 3)
        window = min((total - SINKS * token - held * coded) // (token - coded), held - 2)
        newest = max(1, round(NEWEST_SHARE / (1 - WINDOW_SHARE) * (held - window)))
        heavy_hitters = held - window - newest
    return HeadSizes(window, SINKS, newest, heavy_hitters)


def bytes_for(tokens: int, head_dim: int, value_dim: int) -> int:
    """The fewest bytes with which :func:`head_sizes` has slots for so many tokens, but for what it rounds."""
    token, coded = HeadCost.of(head_dim, value_dim, 0, "int8").token, tier_bytes(head_dim, value_dim, BITS)
    per_byte = WINDOW_SHARE / token + (1 - WINDOW_SHARE) / coded
    return math.ceil((tokens + SINKS * (token / coded - 1)) / per_byte)


def even_bytes(sites: Collection[AttentionSite], size: int) -> dict[str, float]:
    """Bytes of one KV head of each module in an even split: the same number of tokens everywhere."""
    weights = {x.name: x.head_dim + x.value_dim for x in sites}
    total = sum(weights[x.name] * x.kv_heads for x in sites)
    return {name: size * weight / total for name, weight in weights.items()}


def smallest_size(sites: Collection[AttentionSite], share: float = 1.0) -> int:
    """Bytes with which a KV head that gets ``share`` of an even split has room for a token of each kind."""
    least = {(x.head_dim, x.value_dim): _smallest_head(x.head_dim, x.value_dim) for x in sites}
    one = even_bytes(sites, 1)
    return math.ceil(max(least[x.head_dim, x.value_dim] / (share * one[x.name]) for x in sites)) + 1


def _smallest_head(head_dim: int, value_dim: int) -> int:
    """Bytes from which on every number is enough: what is rounded leaves some smaller ones enough, and the next not."""
    total = 5 * head_bytes(HeadSizes(1, 0, 1, 0), head_dim, value_dim, BITS)
    while True:
        try:
            head_sizes(total - 1, head_dim, value_dim)
        except TooSmall:
            return total
        total -= 1
