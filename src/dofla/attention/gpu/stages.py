"""Attention to a stage of a memory that fades from its codes (coding/fading.py) as a Triton kernel. Importing this file
needs triton.

Codes become numbers in registers, some tokens at a time, and are forgotten as soon as all queries of the program have
seen them (online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dofla.attention.gpu import _PRECISION, _block
from dofla.attention.gpu.codes import Codes
from dofla.attention.gpu.decode import units_of, whole_numbers, windows

ROWS = 64
"""Queries of a program at most, those of all heads of a group counted."""

_NOTHING = tl.constexpr(-(2.0**100))  # LOG_ZERO, the logarithm of what nobody sees


def attend(
    turned: Tensor, key: Codes, value: Codes, log_weight: Tensor, gone: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """What each of L queries sees of a line of S tokens, of which the last L enter with one query each.

    Args:
        turned: queries [B, H, L, d + 1], float32; the last number is added to their products with keys.
        key, value: of the line, codes [B, Hkv, S, ...].
        log_weight: [B, S], or [B, Hkv, S] if heads hold other tokens.
        gone: [B, Hkv, S], int32, the first query that sees a token no more; None where they go as they came.
        scaling: of the scores.

    Returns:
        Output [B, H, L, dv], turned like the values, and log-normaliser [B, H, L], float32.
    """
    batch, heads, length, _ = turned.shape
    kv_heads, tokens = key.codes.shape[1:3]
    groups = heads // kv_heads
    turned = turned if turned.stride(-1) == 1 else turned.contiguous()
    log_weight = log_weight.contiguous()
    out = turned.new_empty(batch, heads, length, value.dim)
    normaliser = turned.new_empty(batch, heads, length)
    rows = _block(length * groups, ROWS)
    with torch.cuda.device_of(turned):  # Triton launches on the current device
        _attend[(batch * kv_heads, triton.cdiv(length * groups, rows))](
            *(turned, *key.arguments(), *value.arguments(), key.levels, key.units, log_weight, gone, out, normaliser),
            *(*turned.stride()[:3], kv_heads, groups, length, tokens, key.dim, value.dim, scaling),
            SHARED=log_weight.ndim == 2,
            KEY_BLOCK=key.block,
            KEY_DIM=_block(key.dim, None),
            VALUE_BLOCK=value.block,
            VALUE_DIM=_block(value.dim, None),
            ROWS=rows,
            TOKENS=32,
            PRECISION=_PRECISION,
            num_stages=1,
        )
    return out, normaliser


@triton.jit
def _attend(
    turned,  # [B, H, L, KEY_DIM + 1]
    key,  # [units, S, bytes]
    key_scale,  # [units, S, blocks]
    key_bits,  # [blocks]
    key_bytes,
    value,  # [units, S, bytes]
    value_scale,  # [units, S, blocks]
    value_bits,  # [blocks]
    value_bytes,
    levels,
    scale_units,
    log_weight,  # [B, S] if SHARED, or [units, S]
    gone,  # [units, S] or None
    out,  # [B, H, L, dv], to be filled
    normaliser,  # [B, H, L], to be filled
    turned_batch,
    turned_head,
    turned_token,
    kv_heads,
    groups,
    length,
    tokens,
    key_dim,
    value_dim,
    scaling,
    SHARED: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per unit, a KV head of a batch row, and block of rows: the queries of the group, token by token."""
    unit = tl.program_id(0).to(tl.int64)
    batch, kv_head = unit // kv_heads, unit % kv_heads
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    query, head = row // groups, kv_head * groups + row % groups
    is_row = query < length
    d, n, t = tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM), tl.arange(0, TOKENS)
    key_blocks, value_blocks = key_dim // KEY_BLOCK, value_dim // VALUE_BLOCK

    key += unit * tokens * key_bytes
    key_scale += unit * tokens * key_blocks
    value += unit * tokens * value_bytes
    value_scale += unit * tokens * value_blocks
    log_weight += (batch if SHARED else unit) * tokens
    turned += batch * turned_batch + head * turned_head + query * turned_token
    queries = tl.load(turned[:, None] + d[None, :], mask=is_row[:, None] & (d < key_dim)[None, :], other=0.0) * scaling
    beside = tl.load(turned + key_dim, mask=is_row, other=0.0) * scaling
    key_low, key_high, key_shift, key_first = windows(key_bits, key_blocks, d, KEY_BLOCK, KEY_DIM // KEY_BLOCK)
    low, high, shift, first = windows(value_bits, value_blocks, n, VALUE_BLOCK, VALUE_DIM // VALUE_BLOCK)

    best = tl.full([ROWS], _NOTHING, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, VALUE_DIM], tl.float32)
    places = tokens - length  # of the stage
    start = 0
    if gone is None:
        start = tl.program_id(1) * ROWS // groups + 1  # what the first row sees first
    end = tl.minimum(tokens, places + ((tl.program_id(1) + 1) * ROWS - 1) // groups + 1)
    for begin in range(start, end, TOKENS):
        j = begin + t
        is_token = j < end
        weight = tl.load(log_weight + j, mask=is_token, other=_NOTHING)
        goes = j
        if gone is not None:
            goes = tl.load(gone + unit * tokens + j, mask=is_token, other=0)
        here = (d < key_dim)[:, None] & is_token[None, :]
        keys = whole_numbers(
            key + (j * key_bytes)[None, :],
            key_low[:, None],
            key_high[:, None],
            key_shift[:, None],
            key_first[:, None],
            levels,
            here,
        )
        keys *= units_of(key_scale + (j * key_blocks)[None, :] + (d // KEY_BLOCK)[:, None], scale_units, here)
        scores = tl.dot(queries, keys, input_precision=PRECISION) + beside[:, None] + weight[None, :]
        sees = (
            ((j - places)[None, :] <= query[:, None]) & (query[:, None] < goes[None, :]) & (weight > _NOTHING)[None, :]
        )
        scores = tl.where(sees, scores, float("-inf"))
        top = tl.maximum(best, tl.max(scores, axis=1))
        left, shares = tl.exp(best - top), tl.exp(scores - top[:, None])
        here = is_token[:, None] & (n < value_dim)[None, :]
        values = whole_numbers(
            value + (j * value_bytes)[:, None],
            low[None, :],
            high[None, :],
            shift[None, :],
            first[None, :],
            levels,
            here,
        )
        values *= units_of(value_scale + (j * value_blocks)[:, None] + (n // VALUE_BLOCK)[None, :], scale_units, here)
        total = left[:, None] * total + tl.dot(shares, values, input_precision=PRECISION)
        mass = left * mass + tl.sum(shares, axis=1)
        best = top

    mass = tl.where(mass == 0.0, 1.0, mass)  # who sees nothing gets zeros, and LOG_ZERO
    place = head * length + query + batch * kv_heads * groups * length
    tl.store(normaliser + place, best + tl.log(mass), mask=is_row)
    here = is_row[:, None] & (n < value_dim)[None, :]
    tl.store(out + place[:, None] * value_dim + n[None, :], total / mass[:, None], mask=here)
