"""Some KV heads of a layer as a layer of their own, for processes that share a model."""

from collections.abc import Sequence

from dofla.layers.layer import AttentionLayer


def take_heads(part: AttentionLayer, whole: AttentionLayer, heads: Sequence[int]) -> None:
    """Let a layer of some KV heads, all with compressed caches, take their constants from the layer of all."""
    own, others = part.compressed, whole.compressed
    assert own is not None
    assert others is not None
    groups = {head: (n, place) for n, group in enumerate(others.layout.heads) for place, head in enumerate(group)}
    for tier, mine in zip(own.tiers, own.layout.heads, strict=True):
        sources, places = zip(*(groups[heads[n]] for n in mine), strict=True)  # heads of one size are in one group
        tier.key.take(others.tiers[sources[0]].key, places)
        tier.value.take(others.tiers[sources[0]].value, places)
    if part.smoothing is not None and whole.smoothing is not None:
        part.smoothing.take(whole.smoothing, heads)
    if part.predictor is not None and whole.predictor is not None:
        part.predictor.take(whole.predictor, heads)
