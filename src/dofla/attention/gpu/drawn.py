"""Exact prefill (attention/drawn.py): torch's flash attention, and the squared attention weights that tokens draw, as
Triton kernels, which are further passes over queries and keys that reuse log-normalizers and store no weights."""

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dofla.attention.constants import DECAY, LOG_ZERO
from dofla.attention.drawn import ELEMENTS, LATELY, NEIGHBORS, Drawn, Line, first_tokens
from dofla.attention.exact import merge

KEYS, QUERIES = tl.constexpr(64), tl.constexpr(64)
"""Numbers of keys and queries in a block."""
_NONE = tl.constexpr(-1e30)
"""Score of a token that does not count."""


def flash_attention(query: Tensor, line: Line, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention of queries [B, H, L, d], those of the last L tokens of a line, all of which are real: output
    [B, H, L, dv] and log-normalizer [B, H, L]."""
    groups, before = query.shape[1] // line.key.shape[1], len(line) - query.shape[2]
    key, value = (x.to(query.dtype) for x in (line.key, line.value))
    new = (x[:, :, before:].repeat_interleave(groups, 1) for x in (key, value))
    if query.is_cuda:
        out, normalizer, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, *new, 0.0, True, scale=scaling)
    else:
        out, normalizer = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, *new, 0.0, True, scale=scaling
        )
    if not before:
        return out, normalizer
    outs, normalizers, hidden = [], [], ~line.real[:, :, None, None, :before]
    for rows in query.split(max(1, ELEMENTS // (len(query) * query.shape[1] * before)), 2):
        scores = (rows * scaling).unflatten(1, (-1, groups)).flatten(2, 3) @ key[:, :, :before].mT
        scores = scores.float().unflatten(2, (groups, -1)).masked_fill_(hidden, LOG_ZERO)
        normalizers.append(scores.logsumexp(-1).flatten(1, 2))
        share = scores.softmax(-1).flatten(2, 3).to(rows.dtype)
        outs.append((share @ value[:, :, :before]).unflatten(2, (groups, -1)).flatten(1, 2))
    return merge((out, normalizer), (torch.cat(outs, 2), torch.cat(normalizers, 2)))


def drawn(query: Tensor, line: Line, normalizer: Tensor, window: int, sinks: int, scaling: float) -> Drawn:
    """Attention that a line's tokens drew from queries [B, H, L, d] with log-normalizers [B, H, L] over all tokens."""
    key = line.key.to(query.dtype)
    total = squares(query, key, line.real, normalizer, NEIGHBORS, scaling)
    last, far = query[:, :, -LATELY:], line.real & ~first_tokens(line.real, sinks)
    return Drawn(total, squares(last, key, far, normalizers(last, key, far, window, scaling), window, scaling, DECAY))


def squares(
    query: Tensor, key: Tensor, seen: Tensor, normalizer: Tensor, nearest: int, scaling: float, decay: float = math.inf
) -> Tensor:
    """The sum over queries [B, H, L, d], those of the last L of P tokens, of the squares of their weights [B, Hkv, P],
    float32. Tokens count that are ``seen`` [B, Hkv, P], and at least ``nearest`` behind a query; normalizers are
    [B, H, L]. Each query counts less than the next by one part in ``decay``."""
    grid = triton.cdiv(key.shape[2], KEYS.value), key.shape[0] * key.shape[1]
    out = torch.empty(key.shape[:3], dtype=torch.float32, device=query.device)
    _launch(_squares[grid], (query, key, seen, normalizer, out), nearest, scaling, math.log1p(-1 / decay))
    return out


def normalizers(query: Tensor, key: Tensor, seen: Tensor, nearest: int, scaling: float) -> Tensor:
    """Log-normalizers [B, H, L], float32, over the tokens that count as for :func:`squares`; -inf without any."""
    grid = triton.cdiv(query.shape[2], QUERIES.value), query.shape[0] * query.shape[1]
    out = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    _launch(_normalizers[grid], (query, key, seen, out), nearest, scaling)
    return out


def _launch(kernel: Callable[..., object], tensors: tuple[Tensor, ...], *numbers: float) -> None:
    query, key = tensors[:2]
    sizes = query.shape[1] // key.shape[1], query.shape[2], key.shape[2], key.shape[3]
    with torch.cuda.device_of(query):  # Triton launches on the current device
        kernel(*(x.contiguous() for x in tensors), *sizes, *numbers, DIM=max(16, triton.next_power_of_2(key.shape[3])))


@triton.jit
def _squares(query, key, seen, normalizer, out, groups, length, tokens, dim, nearest, scaling, rate, DIM: tl.constexpr):
    """One program per block of keys of a KV head, which walks through the queries that count for them."""
    block, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d, own, row = tl.arange(0, DIM), block * KEYS + tl.arange(0, KEYS), tl.arange(0, QUERIES)
    there = own < tokens
    keys = tl.load(
        key + (unit * tokens + own)[None, :] * dim + d[:, None], mask=there[None, :] & (d[:, None] < dim), other=0.0
    )
    counts = tl.load(seen + unit * tokens + own, mask=there, other=0) != 0
    first = tl.maximum(block * KEYS + nearest - (tokens - length), 0) // QUERIES * QUERIES
    total = tl.zeros([KEYS], dtype=tl.float32)
    for group in range(groups):
        head = unit * groups + group
        rows, levels = query + head * length * dim, normalizer + head * length
        for start in range(first, length, QUERIES):
            place = start + row
            asks = place < length
            asked = tl.load(
                rows + place[:, None] * dim + d[None, :], mask=asks[:, None] & (d[None, :] < dim), other=0.0
            )
            level = tl.load(levels + place, mask=asks, other=0.0)
            scores = tl.dot(asked, keys) * scaling - level[:, None]
            far = place[:, None] + (tokens - length) - own[None, :] >= nearest
            weight = tl.where(far & asks[:, None] & counts[None, :], tl.exp(scores), 0.0)
            fade = tl.exp(rate * (length - 1 - place).to(tl.float32))
            total += tl.sum(weight * weight * fade[:, None], axis=0)
    tl.store(out + unit * tokens + own, total, mask=there)


@triton.jit
def _normalizers(query, key, seen, out, groups, length, tokens, dim, nearest, scaling, DIM: tl.constexpr):
    """One program per block of queries of a head, which walks through the keys that they see."""
    block, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kv_unit = unit // groups
    d, place, column = tl.arange(0, DIM), block * QUERIES + tl.arange(0, QUERIES), tl.arange(0, KEYS)
    asks = place < length
    asked = tl.load(
        query + (unit * length + place)[:, None] * dim + d[None, :], mask=asks[:, None] & (d[None, :] < dim), other=0.0
    )
    most = tl.full([QUERIES], _NONE, dtype=tl.float32)
    total = tl.zeros([QUERIES], dtype=tl.float32)
    for start in range(0, tl.minimum(tokens - length + (block + 1) * QUERIES - nearest, tokens), KEYS):
        own = start + column
        there = own < tokens
        keys = tl.load(
            key + (kv_unit * tokens + own)[None, :] * dim + d[:, None],
            mask=there[None, :] & (d[:, None] < dim),
            other=0.0,
        )
        counts = tl.load(seen + kv_unit * tokens + own, mask=there, other=0) != 0
        far = place[:, None] + (tokens - length) - own[None, :] >= nearest
        scores = tl.where(far & counts[None, :], tl.dot(asked, keys) * scaling, _NONE)
        higher = tl.maximum(most, tl.max(scores, axis=1))
        weights = tl.where(scores > _NONE, tl.exp(scores - higher[:, None]), 0.0)
        total = total * tl.exp(most - higher) + tl.sum(weights, axis=1)
        most = higher
    tl.store(out + unit * length + place, most + tl.log(total), mask=asks)
