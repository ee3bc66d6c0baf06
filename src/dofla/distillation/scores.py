"""The scores of a layer with feature maps, pair by pair: what losses and calibration look at."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dofla.attention import LOG_ZERO, accumulable, exact_scores, log_kernel, rounded
from dofla.attention.heads import query_heads, select
from dofla.errors import DoflaError
from dofla.feature_maps.heads import FeatureHeads
from dofla.integration.recorder import AttentionCall
from dofla.layers import AttentionLayer
from dofla.layers.layer import without_autocast


def feature_heads(layer: AttentionLayer) -> list[FeatureHeads]:
    """The groups of a layer all of whose heads have feature maps; DoflaError for another."""
    groups = [group for group in layer.groups if isinstance(group, FeatureHeads)]
    if len(groups) < len(layer.groups):
        raise DoflaError("a compressed cache has no feature maps to train: linearize the model instead")
    return groups


@without_autocast
def log_scores(layer: AttentionLayer, query: Tensor, call: AttentionCall, rows: Tensor) -> Tensor:
    """Log of the unnormalized attention weights [B, H, R, L] of some rows [R] of a call, before masking: exact scores
    in the window and at sinks, the log of the approximate kernel elsewhere; ``query`` [B, H, R, d] are those of the
    rows."""
    query, key = layer.smooth(query, call.key)
    approximate, exact, hybrid = [], [], is_hybrid(layer)
    for group, own_query, own_key in split_heads(layer, query, key):
        own_key = rounded(own_key) if group.int8 else own_key
        if group.features:
            a, b = group.map.log_query(own_query, call.scaling), group.map.log_key(own_key, call.scaling)
            approximate.append(log_kernel(a, b))
        else:
            approximate.append(accumulable(own_query).new_full((*own_query.shape[:-1], key.shape[-2]), LOG_ZERO))
        if hybrid:
            exact.append(exact_scores(own_query, own_key, call.scaling))
    if not hybrid:
        return _join(layer, approximate)
    return torch.where(seen_exactly(layer, call, rows), _join(layer, exact), _join(layer, approximate))


def is_hybrid(layer: AttentionLayer) -> bool:
    """True if any head has a local window or sinks beside its features."""
    return any(group.window or group.sinks for group in layer.groups if isinstance(group, FeatureHeads))


def seen_exactly(layer: AttentionLayer, call: AttentionCall, rows: Tensor) -> Tensor:
    """Which keys the query ``rows`` [R] of a call see in the window or as sinks: [B or 1, H, R, L], or one head for all
    if they agree."""
    length, share, weight = call.key.shape[-2], call.query.shape[1] // call.key.shape[1], call.weight
    distance = _ages(rows, length, weight) if call.causal else _ages(rows, length, None).abs()
    real = torch.ones_like(distance[:, 0], dtype=torch.bool) if weight is None else weight > 0
    seen, groups = [], feature_heads(layer)
    for group in groups:
        first = real & (real.cumsum(-1) <= group.sinks)
        near = ((distance < group.window) | first.unsqueeze(1)).unsqueeze(1)
        seen.append(near if len(groups) == 1 else near.expand(-1, len(group.heads) * share, -1, -1))
    return _join(layer, seen)


def split_heads(layer: AttentionLayer, query: Tensor, key: Tensor) -> Iterator[tuple[FeatureHeads, Tensor, Tensor]]:
    """Each group with its queries and keys."""
    share, groups = query.shape[1] // key.shape[1], feature_heads(layer)
    for group in groups:
        if len(groups) == 1:
            yield group, query, key
        else:
            yield group, select(query, query_heads(group.heads, share)), select(key, group.heads)


def _join(layer: AttentionLayer, outputs: Sequence[Tensor]) -> Tensor:
    """Outputs [B, H', ...] of the groups put back in the order of the heads."""
    if len(outputs) == 1:
        return outputs[0]
    heads = [head for group in layer.groups for head in group.heads]
    share = sum(out.shape[1] for out in outputs) // len(heads)
    order = torch.tensor(query_heads(heads, share))
    return torch.cat(list(outputs), dim=1)[:, order.argsort().to(outputs[0].device)]


def _ages(rows: Tensor, length: int, weight: Tensor | None) -> Tensor:
    """The age of each of ``length`` keys at the query ``rows`` [R], in real tokens [B or 1, R, length]; negative for
    keys after the query."""
    places = torch.arange(length, device=rows.device)[None] if weight is None else (weight > 0).cumsum(-1)
    return places[:, rows].unsqueeze(-1) - places.unsqueeze(1)
