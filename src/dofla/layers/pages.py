"""A step of a server: tokens of several sequences, whose states are pages of a pool."""

import torch
from torch import Tensor

from dofla.attention import Call, CompressedState
from dofla.attention.backends import backend_for
from dofla.layers.layer import AttentionLayer, without_autocast


@without_autocast
@torch.no_grad()
def read_pages(
    layer: AttentionLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    pool: Tensor,
    pages: Tensor,
    starts: list[int],
    exact: bool = False,
) -> Tensor:
    """:meth:`AttentionLayer.forward` of n sequences of different lengths, whose states are updated in their pages.

    Args:
        layer: all of whose heads are compressed.
        query: of all sequences, one after the other, [1, H, L, d].
        key, value: likewise, [1, Hkv, L, d] and [1, Hkv, L, dv].
        scaling, exact: as :meth:`AttentionLayer.forward` takes them.
        pool: [P, bytes], uint8.
        pages: of each sequence [n], int64; no two are the same.
        starts: where each sequence begins among the tokens, and their number, [n + 1]; those with one token come first.

    Returns:
        Output [1, H, L, dv].
    """
    heads = layer.compressed
    assert heads is not None
    count = len(starts) - 1
    single = next((n for n in range(count) if starts[n + 1] - starts[n] > 1), count)
    if not exact or single == count:
        call = Call(query, key, value, scaling, smoothing=layer.smoothing)
        out = backend_for(call.vectors).read_pages(heads, call, pool, pages, starts)
        if out is not None:
            return out
    out = value.new_empty(*query.shape[:-1], value.shape[-1])
    for first, last in [(0, single)] * (single > 0) + [(n, n + 1) for n in range(single, count)]:
        rows, own_pages = slice(starts[first], starts[last]), pages[first:last]
        parts = [x[:, :, rows] for x in (query, key, value, out)]
        if first < single:  # a token of each sequence: as a batch
            parts = [part.transpose(0, 2) for part in parts]
        own_out, (after,) = layer(*parts[:3], scaling=scaling, states=[CompressedState(pool[own_pages])], exact=exact)
        parts[3].copy_(own_out)
        pool[own_pages] = after.rows
    return out
