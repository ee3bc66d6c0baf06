"""Exact prefill (attention/drawn.py): torch's flash attention, and the squared attention weights that tokens draw, as
Triton kernels, which are further passes over queries and keys that reuse log-normalizers and store no weights."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dofla.attention.constants import DECAY, LOG_ZERO
from dofla.attention.drawn import ELEMENTS, LATELY, NEIGHBORS, Drawn, Line
from dofla.attention.exact import merge

KEYS, QUERIES = tl.constexpr(64), tl.constexpr(64)
"""Numbers of keys and queries in a block: small enough that an SM holds four, whose products and powers overlap."""
_NONE = tl.constexpr(-1e30)
"""Score of a token that does not count."""
_LOG2E = tl.constexpr(math.log2(math.e))
"""Exponentials are powers of two, which a GPU has an instruction for."""
_VARYING = ("length", "tokens", "least", "nearest")
"""Numbers that kernels are compiled once for, whatever they are divisible by."""


def flash_attention(query: Tensor, line: Line, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention of queries [B, H, L, d], those of the last L tokens of a line of their dtype, all of which are real:
    output [B, H, L, dv] and log-normalizer [B, H, L]."""
    key, value, before = line.key, line.value, len(line) - query.shape[2]
    groups, new = query.shape[1] // key.shape[1], (x[:, :, before:] for x in (key, value))
    if query.is_cuda:
        out, normalizer, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, *new, 0.0, True, scale=scaling)
    else:
        out, normalizer = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, *new, 0.0, True, scale=scaling
        )
    if not before:
        return out, normalizer
    outs, normalizers, hidden = [], [], line.rank[:, :, None, None, :before] < 0
    for rows in query.split(max(1, ELEMENTS // (len(query) * query.shape[1] * before)), 2):
        scores = (rows * scaling).unflatten(1, (-1, groups)).flatten(2, 3) @ key[:, :, :before].mT
        scores = scores.float().unflatten(2, (groups, -1)).masked_fill_(hidden, LOG_ZERO)
        normalizers.append(scores.logsumexp(-1).flatten(1, 2))
        share = scores.softmax(-1).flatten(2, 3).to(rows.dtype)
        outs.append((share @ value[:, :, :before]).unflatten(2, (groups, -1)).flatten(1, 2))
    return merge((out, normalizer), (torch.cat(outs, 2), torch.cat(normalizers, 2)))


def drawn(query: Tensor, line: Line, normalizer: Tensor, window: int, sinks: int, scaling: float) -> Drawn:
    """Attention that a line's tokens drew from queries [B, H, L, d] with log-normalizers [B, H, L] over all tokens."""
    total = normalizer.new_empty(*query.shape[:2], len(line))
    squares(query, line, 0, normalizer, NEIGHBORS, scaling, total)
    return Drawn(_of_kv_heads(total, line), drawn_lately(query, line, window, sinks, scaling))


def drawn_lately(query: Tensor, line: Line, window: int, sinks: int, scaling: float) -> Tensor:
    """Attention that a line's tokens drew lately [B, Hkv, P] from queries [B, H, L, d] of its last tokens."""
    last = query[:, :, -LATELY:]
    out = torch.empty(*query.shape[:2], len(line), dtype=torch.float32, device=query.device)
    squares(last, line, sinks, normalizers(last, line, sinks, window, scaling), window, scaling, out, DECAY)
    return _of_kv_heads(out, line)


def _of_kv_heads(x: Tensor, line: Line) -> Tensor:
    return x.unflatten(1, (line.key.shape[1], -1)).sum(2)


def squares(
    query: Tensor,
    line: Line,
    least: int,
    normalizer: Tensor,
    nearest: int,
    scaling: float,
    out: Tensor,
    decay: float = math.inf,
) -> None:
    """Sums over the queries [B, H, L, d] of each head, those of the last L of P tokens, of the squares of the tokens'
    weights, into ``out`` [B, H, P], float32. Tokens count that have ``least`` others before them, and are at least
    ``nearest`` behind a query; normalizers are [B, H, L]. Each query counts less than the next by one part in
    ``decay``."""
    rate = math.log1p(-1 / decay) * _LOG2E.value
    _launch(_squares, len(line), KEYS.value, query, line, (normalizer, out), least, nearest, scaling, rate)


def normalizers(query: Tensor, line: Line, least: int, nearest: int, scaling: float) -> Tensor:
    """Log-normalizers [B, H, L], float32, over the tokens that count as for :func:`squares`; -inf without any."""
    out = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    _launch(_normalizers, query.shape[2], QUERIES.value, query, line, (out,), least, nearest, scaling)
    return out


def _launch(
    kernel: Any, rows: int, block: int, query: Tensor, line: Line, others: tuple[Tensor, ...], *numbers: float
) -> None:
    """One program per block of rows and query head, of which those with many tokens to walk through come first."""
    key = line.key
    strided = [x if x.stride(-1) == 1 else x.contiguous() for x in (query, key)] + [line.rank]
    strides = [n for x in strided for n in x.stride()[:3]]
    sizes = query.shape[1], query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    dims = key.shape[3], max(16, triton.next_power_of_2(key.shape[3]))
    with torch.cuda.device_of(query):  # Triton launches on the current device
        kernel[(query.shape[0] * query.shape[1], triton.cdiv(rows, block))](
            *(*strided, *(x.contiguous() for x in others), *strides, *sizes, *numbers, *dims), enable_fp_fusion=True
        )


@triton.jit
def _rows(x, unit, heads, groups, of_batch, of_head):
    """Where the rows of a query head begin, or those of its KV head."""
    return x + (unit // heads).to(tl.int64) * of_batch + (unit % heads // groups).to(tl.int64) * of_head


@triton.jit(do_not_specialize=_VARYING)
def _squares(
    query,
    key,
    rank,  # [B, Hkv, P]
    normalizer,
    out,
    query_batch,  # strides of queries, keys and ranks
    query_head,
    query_token,
    key_batch,
    key_head,
    key_token,
    rank_batch,
    rank_head,
    rank_token,
    heads,
    groups,
    length,
    tokens,
    least,
    nearest,
    scaling,
    rate,
    dim: tl.constexpr,
    DIM: tl.constexpr,
):
    """One program per block of keys and query head, which walks through the queries that count for them."""
    unit, begin = tl.program_id(0), tl.program_id(1) * KEYS
    d, own = tl.arange(0, DIM), begin + tl.arange(0, KEYS)
    there, before = own < tokens, tokens - length
    queries = _rows(query, unit, heads, 1, query_batch, query_head)
    keys = _rows(key, unit, heads, groups, key_batch, key_head) + own[None, :] * key_token + d[:, None]
    keys = tl.load(keys, mask=there[None, :] & (d < dim)[:, None], other=0.0)
    normalizer += unit.to(tl.int64) * length
    # Queries close to the keys do not count for all of them, those from the end of their block on do.
    first = tl.maximum(begin + nearest - before, 0) // QUERIES * QUERIES
    close = tl.minimum(tl.cdiv(tl.maximum(begin + KEYS - 1 + nearest - before, 0), QUERIES) * QUERIES, length)
    total = tl.zeros([QUERIES, KEYS], dtype=tl.float32)
    for start in range(first, close, QUERIES):
        place = start + tl.arange(0, QUERIES)
        weights = _squared(queries, keys, normalizer, place, query_token, length, scaling, rate, dim, DIM)
        total += tl.where(place[:, None] + (before - nearest) >= own[None, :], weights, 0.0)
    for start in range(close, length, QUERIES):
        place = start + tl.arange(0, QUERIES)
        total += _squared(queries, keys, normalizer, place, query_token, length, scaling, rate, dim, DIM)
    # A token that does not count may have weights beyond any number.
    ranks = _rows(rank, unit, heads, groups, rank_batch, rank_head) + own * rank_token
    counts = tl.load(ranks, mask=there, other=-1) >= least
    tl.store(out + unit.to(tl.int64) * tokens + own, tl.where(counts, tl.sum(total, axis=0), 0.0), mask=there)


@triton.jit
def _squared(queries, keys, normalizer, place, stride, length, scaling, rate, dim: tl.constexpr, DIM: tl.constexpr):
    """Squared weights [QUERIES, KEYS] of the queries at ``place``, fading; zero of those beyond the last."""
    d, asks = tl.arange(0, DIM), place < length
    asked = tl.load(queries + place[:, None] * stride + d[None, :], mask=asks[:, None] & (d < dim)[None, :], other=0.0)
    level = tl.load(normalizer + place, mask=asks, other=float("inf")) * (2 * _LOG2E)
    level -= rate * (length - 1 - place).to(tl.float32)
    return tl.exp2(tl.dot(asked, keys) * (2 * _LOG2E * scaling) - level[:, None])


@triton.jit(do_not_specialize=_VARYING)
def _normalizers(
    query,
    key,
    rank,  # [B, Hkv, P]
    out,
    query_batch,  # strides of queries, keys and ranks
    query_head,
    query_token,
    key_batch,
    key_head,
    key_token,
    rank_batch,
    rank_head,
    rank_token,
    heads,
    groups,
    length,
    tokens,
    least,
    nearest,
    scaling,
    dim: tl.constexpr,
    DIM: tl.constexpr,
):
    """One program per block of queries of a head, which walks through the keys that they see."""
    unit, begin = tl.program_id(0), tl.program_id(1) * QUERIES
    d, place = tl.arange(0, DIM), begin + tl.arange(0, QUERIES)
    asks, last = place < length, place + (tokens - length - nearest)  # tokens that queries see
    asked = _rows(query, unit, heads, 1, query_batch, query_head) + place[:, None] * query_token + d[None, :]
    asked = tl.load(asked, mask=asks[:, None] & (d < dim)[None, :], other=0.0)
    keys = _rows(key, unit, heads, groups, key_batch, key_head)
    ranks = _rows(rank, unit, heads, groups, rank_batch, rank_head)
    # New tokens all count, but for the first ``least``; blocks of them that the first query sees in full need no masks.
    end = tl.maximum(tl.minimum(begin + QUERIES + (tokens - length - nearest), tokens), 0)
    low = tl.minimum(tl.cdiv(tokens - length + least, KEYS) * KEYS, end)
    high = tl.maximum((begin + 1 + (tokens - length - nearest)) // KEYS * KEYS, low)
    most = tl.full([QUERIES], _NONE, dtype=tl.float32)
    total = tl.zeros([QUERIES], dtype=tl.float32)
    scale = scaling * _LOG2E
    for start in range(0, low, KEYS):
        scores = _scores(asked, keys, start, key_token, tokens, dim, DIM) * scale
        scores = _hidden(scores, ranks, start, rank_token, tokens, least, last)
        most, total = _summed(most, total, scores, True)
    for start in range(low, high, KEYS):
        most, total = _summed(most, total, _scores(asked, keys, start, key_token, tokens, dim, DIM) * scale, False)
    for start in range(high, end, KEYS):
        scores = _scores(asked, keys, start, key_token, tokens, dim, DIM) * scale
        scores = _hidden(scores, ranks, start, rank_token, tokens, least, last)
        most, total = _summed(most, total, scores, True)
    tl.store(out + unit.to(tl.int64) * length + place, (most + tl.log2(total)) / _LOG2E, mask=asks)


@triton.jit
def _scores(asked, keys, start, stride, tokens, dim: tl.constexpr, DIM: tl.constexpr):
    """Products [QUERIES, KEYS] with the keys from ``start`` on."""
    d, own = tl.arange(0, DIM), start + tl.arange(0, KEYS)
    there = (own < tokens)[None, :] & (d < dim)[:, None]
    return tl.dot(asked, tl.load(keys + own[None, :] * stride + d[:, None], mask=there, other=0.0))


@triton.jit
def _hidden(scores, ranks, start, stride, tokens, least, last):
    """Scores but of tokens that do not count."""
    own = start + tl.arange(0, KEYS)
    counts = tl.load(ranks + own * stride, mask=own < tokens, other=-1) >= least
    return tl.where(counts[None, :] & (own[None, :] <= last[:, None]), scores, _NONE)


@triton.jit
def _summed(most, total, scores, MASKED: tl.constexpr):
    """The largest scores so far, and sums of powers of two measured from them."""
    higher = tl.maximum(most, tl.max(scores, axis=1))
    weights = tl.exp2(scores - higher[:, None])
    if MASKED:
        weights = tl.where(scores > _NONE, weights, 0.0)
    return higher, total * tl.exp2(most - higher) + tl.sum(weights, axis=1)
