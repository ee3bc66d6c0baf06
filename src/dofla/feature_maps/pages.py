"""A step of a server: tokens of several sequences, whose states are pages of pools."""

from __future__ import annotations

from torch import Tensor

from dofla.attention import FlatState
from dofla.attention.backends import backend_for
from dofla.feature_maps.layer import LinearAttention, without_autocast


@without_autocast
def read_pages(
    layer: LinearAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    pools: list[Tensor],
    pages: Tensor,
    starts: list[int],
    exact: bool = False,
) -> Tensor:
    """:meth:`LinearAttention.forward` of n sequences of different lengths, whose states are updated in their pages.

    Args:
        layer: all of whose groups have a layout and no features.
        query: of all sequences, one after the other, [1, H, L, d].
        key, value: likewise, [1, Hkv, L, d] and [1, Hkv, L, dv].
        scaling, exact: as :meth:`LinearAttention.forward` takes them.
        pools: of each group [P, bytes], uint8.
        pages: of each sequence [n], int64; no two are the same.
        starts: where each sequence begins among the tokens, and their number, [n + 1].

    Returns:
        Output [1, H, L, dv].
    """
    count = len(starts) - 1
    single = next((n for n in range(count) if starts[n + 1] - starts[n] > 1), count)
    if not exact or single == count:
        own = *layer.smoothed(query, key), value
        out = backend_for(own).read_pages(layer.layouts, *own, pools, pages, starts, scaling)
        if out is not None:
            return out
    out = value.new_empty(*query.shape[:-1], value.shape[-1])
    for first, last in [(0, single)] * (single > 0) + [(n, n + 1) for n in range(single, count)]:
        rows, own_pages = slice(starts[first], starts[last]), pages[first:last]
        parts = [x[:, :, rows] for x in (query, key, value, out)]
        if first < single:  # a token of each sequence: as a batch
            parts = [part.transpose(0, 2) for part in parts]
        states = [FlatState(None, pool[own_pages]) for pool in pools]
        own_out, after = layer(*parts[:3], scaling=scaling, states=states, exact=exact)
        parts[3].copy_(own_out)
        for pool, state in zip(pools, after, strict=True):
            pool[own_pages] = state.tokens
    return out
