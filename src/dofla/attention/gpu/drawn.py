"""Squared attention weights that keys draw from the queries of a prefill (prefill.py), as a Triton kernel: a
second pass over queries and keys that reuses the log-sum-exp of flash attention and stores no weights. Importing this
file needs triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS, QUERIES = 64, 64
"""Numbers of keys and queries in a block."""


def drawn(query: Tensor, key: Tensor, real: Tensor, normalizer: Tensor, neighbors: int, scaling: float) -> Tensor:
    """The sum over queries of the squares of their weights [B, Hkv, P], float32.

    Args:
        query: [B, H, L, d], of the last L of the P tokens.
        key: [B, Hkv, P, d], in the dtype of the queries.
        real: [B, P], False for free slots.
        normalizer: of each query over all keys that it sees [B, H, L], float32.
        neighbors: queries right after a token, and its own, that do not count.
        scaling: of the scores.
    """
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    normalizer, real = normalizer.contiguous(), real.contiguous()
    batch, heads, length, dim = query.shape
    kv_heads, tokens = key.shape[1:3]
    out = torch.empty(batch, kv_heads, tokens, dtype=torch.float32, device=query.device)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        _drawn[(triton.cdiv(tokens, KEYS), batch * kv_heads)](
            *(query, key, real, normalizer, out, *query.stride()[:3], *key.stride()[:3]),
            *(kv_heads, heads // kv_heads, length, tokens, dim, neighbors, scaling),
            DIM=max(16, triton.next_power_of_2(dim)),
            KEYS=KEYS,
            QUERIES=QUERIES,
        )
    return out


@triton.jit
def _drawn(
    query,
    key,
    real,
    normalizer,
    out,
    query_batch,
    query_head,
    query_token,
    key_batch,
    key_head,
    key_token,
    kv_heads,
    groups,
    length,
    tokens,
    dim,
    neighbors,
    scaling,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """One program per block of keys of a KV head, which walks through the queries that count for them."""
    block, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = unit // kv_heads, unit % kv_heads
    d, own, row = tl.arange(0, DIM), block * KEYS + tl.arange(0, KEYS), tl.arange(0, QUERIES)
    there = own < tokens
    keys = tl.load(
        key + batch * key_batch + head * key_head + own[None, :] * key_token + d[:, None],
        mask=there[None, :] & (d[:, None] < dim),
        other=0.0,
    )
    counts = tl.load(real + batch * tokens + own, mask=there, other=0) != 0
    first = tl.maximum(block * KEYS + neighbors - (tokens - length), 0) // QUERIES * QUERIES
    total = tl.zeros([KEYS], dtype=tl.float32)
    for group in range(groups):
        asking = head * groups + group
        rows = query + batch * query_batch + asking * query_head
        levels = normalizer + (batch * kv_heads * groups + asking) * length
        for start in range(first, length, QUERIES):
            place = start + row
            asks = place < length
            asked = tl.load(
                rows + place[:, None] * query_token + d[None, :], mask=asks[:, None] & (d[None, :] < dim), other=0.0
            )
            level = tl.load(levels + place, mask=asks, other=0.0)
            scores = tl.dot(asked, keys) * scaling - level[:, None]
            far = place[:, None] + (tokens - length) - own[None, :] >= neighbors
            weight = tl.where(far & asks[:, None] & counts[None, :], tl.exp(scores), 0.0)
            total += tl.sum(weight * weight, axis=0)
    tl.store(out + unit * tokens + own, total, mask=there)
