"""The plan of a compressed cache: how many tokens of each kind every KV head gets for a size in bytes, or that it
grows."""

import math
from collections.abc import Collection, Mapping
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
LEAST_SINKS, MOST_SINKS, SINK_SHARE = 2, 16, 1 / 32
"""Attention sinks are a fraction of a head's bytes, too. Some models have theirs at the first token, others at the
first full stop or line break (Qwen2.5), and rounding one to a few bits changes all attention."""
BITS = 3.0
"""Bits per number in the tier. On SmolLM2 at 1.5 MiB (``docs/research/cache.md``)."""
GROWING = HeadSizes(window=32, sinks=MOST_SINKS, newest=1, heavy_hitters=0)
"""The sizes of a KV head that holds every token."""


class TooSmall(DoflaError):
    """A size without room for a token of each kind."""


def compressed_plan(
    target: Target,
    size: int | None,
    *,
    head_budgets: HeadBudgets | None = None,
    prefill: str = "exact",
    bits: float = BITS,
) -> Plan:
    """The plan of :func:`dofla.compress` for a cache of ``size`` bytes, or one in which all heads grow; DoflaError as
    there.

    Head budgets are by default an even split, in proportion to the size of a token. Bytes that a head cannot fill go to
    the others, and then to int8.
    """
    sites, positions, budgets = target.compressed, target.length, head_budgets or HeadBudgets()
    if size is None:
        budgets = HeadBudgets(growing={x.name: range(x.kv_heads) for x in sites})
    grow = {x.name: len(budgets.growing.get(x.name, ())) for x in sites}
    fixed = sum(grow[x.name] * head_bytes(GROWING, x.head_dim, x.value_dim, bits) for x in sites)
    dims = {x.name: (x.head_dim, x.value_dim) for x in sites}
    most = {name: math.inf if positions is None else bytes_for(positions, *own, bits) for name, own in dims.items()}
    left = 0 if size is None else max(size - fixed, 1)
    heads, even = {x.name: x.kv_heads for x in sites}, even_bytes(sites, left, grow)
    own_bytes = budgets.divided(left, heads, even, most)
    layers: list[LayerPlan] = []
    for site in target.sites.values():
        shape = site.name, site.kv_heads, site.head_dim, site.value_dim
        if site.name not in heads:
            if not site.linear_time or site.name in target.keep_softmax:
                layers.append(SoftmaxLayer(*shape))
            continue
        of_layer, growing = own_bytes[site.name], budgets.growing.get(site.name, ())
        try:
            sizes = [
                GROWING if n in growing else head_sizes(math.floor(x + 1e-6), *dims[site.name], positions, bits)
                for n, x in enumerate(of_layer)
            ]
        except TooSmall:
            given, needed = in_bytes(size or 0), in_bytes(fixed + smallest_size(sites, min(1.0, budgets.least), bits))
            raise TooSmall(
                f"size {given} is too small for a token of each kind in every KV head: give {needed} or more"
            ) from None
        window, sinks, newest, heavy_hitters = (alike(each) for each in zip(*sizes, strict=True))
        layers.append(CompressedLayer(*shape, window, sinks, newest, heavy_hitters, bits))
    made_by: dict[str, Any] = {"strategy": STRATEGY} | ({"evict": False} if size is None else {"size": size})
    if head_budgets is not None and size is not None:
        made_by |= head_budgets.record()
    return Plan(layers, target.name, made_by, target.context, prefill)


def head_sizes(total: int, head_dim: int, value_dim: int, most: int | None = None, bits: float = BITS) -> HeadSizes:
    """Tokens of a KV head that take at most ``total`` bytes. No text has more than ``most`` tokens: bytes beyond those
    of so many go to int8. TooSmall if there is no room for a token of each kind."""
    token, coded = HeadCost.of(head_dim, value_dim, 0, "int8").token, tier_bytes(head_dim, value_dim, bits)
    window, newest = round(WINDOW_SHARE * total / token), round(NEWEST_SHARE * total / coded)
    sinks = _sinks(total, token)
    heavy_hitters = (total - (window + sinks) * token) // coded - newest
    if min(window, newest, heavy_hitters) < 1:
        raise TooSmall(f"{total} bytes are too few for a token of each kind")
    if most is not None and window + sinks + newest + heavy_hitters > most:
        sinks = min(sinks, max(most - 3, LEAST_SINKS))
        held = max(most - sinks, 3)
        window = min((total - sinks * token - held * coded) // (token - coded), held - 2)
        newest = max(1, round(NEWEST_SHARE / (1 - WINDOW_SHARE) * (held - window)))
        heavy_hitters = held - window - newest
    return HeadSizes(window, sinks, newest, heavy_hitters)


def _sinks(total: float, token: int) -> int:
    """Attention sinks of a head of so many bytes, of which one takes ``token``."""
    return min(max(round(SINK_SHARE * total / token), LEAST_SINKS), MOST_SINKS)


def bytes_for(tokens: int, head_dim: int, value_dim: int, bits: float = BITS) -> int:
    """The fewest bytes with which :func:`head_sizes` has slots for so many tokens, but for what it rounds."""
    token, coded = HeadCost.of(head_dim, value_dim, 0, "int8").token, tier_bytes(head_dim, value_dim, bits)
    per_byte = WINDOW_SHARE / token + (1 - WINDOW_SHARE) / coded
    for sinks in range(LEAST_SINKS, MOST_SINKS + 1):
        total = math.ceil((tokens + sinks * (token / coded - 1)) / per_byte)
        if _sinks(total, token) <= sinks:
            break
    return total


def even_bytes(
    sites: Collection[AttentionSite], size: int, without: Mapping[str, int] | None = None
) -> dict[str, float]:
    """Bytes of one KV head of each module in an even split: the same number of tokens everywhere; ``without`` so many
    heads of each."""
    weights, left = {x.name: x.head_dim + x.value_dim for x in sites}, without or {}
    total = sum(weights[x.name] * (x.kv_heads - left.get(x.name, 0)) for x in sites)
    return {name: size * weight / max(total, 1) for name, weight in weights.items()}


def smallest_size(sites: Collection[AttentionSite], share: float = 1.0, bits: float = BITS) -> int:
    """Bytes with which a KV head that gets ``share`` of an even split has room for a token of each kind."""
    least = {(x.head_dim, x.value_dim): _smallest_head(x.head_dim, x.value_dim, bits) for x in sites}
    one = even_bytes(sites, 1)
    return math.ceil(max(least[x.head_dim, x.value_dim] / (share * one[x.name]) for x in sites)) + 1


def _smallest_head(head_dim: int, value_dim: int, bits: float = BITS) -> int:
    """Bytes from which on every number is enough: what is rounded leaves some smaller ones enough, and the next not."""
    total = 5 * head_bytes(HeadSizes(1, 0, 1, 1), head_dim, value_dim, bits)
    while True:
        try:
            head_sizes(total - 1, head_dim, value_dim, None, bits)
        except TooSmall:
            return total
        total -= 1
