"""Attention to a tier of a compressed cache from its codes (coding/tiers.py) as a Triton kernel. Importing this file
needs triton.

Codes become numbers in registers, some tokens at a time, and are forgotten as soon as all queries of the program have
seen them (online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dofla.attention.constants import LOG_ZERO
from dofla.attention.gpu import block_count, block_size
from dofla.attention.gpu.codes import Codes
from dofla.attention.gpu.decode import LEAST, levels_of, products, units_of

ROWS = 64
"""Queries of a program at most, those of all heads of a group counted."""

VALUES = 64
"""Numbers of a value of a program at most: what fits into its registers."""

PRECISION = "tf32x3" if torch.version.hip is None else "ieee"
"""Input precision of float32 products: three in TF32, on the matrix units, are as accurate as one in float32."""

_NOTHING = tl.constexpr(LOG_ZERO)


def attend(
    rotated: Tensor, key: Codes, value: Codes, log_weight: Tensor, evicted_at: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention of L queries to a line of S tokens, of which the last L enter with one query each.

    Args:
        rotated: queries [B, H, L, d + 1], float32; the last number is added to their products with keys.
        key, value: of the line, codes [B, Hkv, S, ...].
        log_weight: [B, S], or [B, Hkv, S] if heads hold different tokens.
        evicted_at: [B, Hkv, S], int32, the first query that sees a token no more; None if the oldest are evicted first.
        scaling: of the scores.

    Returns:
        Output [B, H, L, dv], rotated like the values, and log-normalizer [B, H, L], float32.
    """
    batch, heads, length, _ = rotated.shape
    kv_heads, tokens = key.codes.shape[1:3]
    groups = heads // kv_heads
    rotated, log_weight = rotated.contiguous(), log_weight.contiguous()
    out = rotated.new_empty(batch, heads, length, value.dim)
    normalizer = rotated.new_empty(batch, heads, length)
    rows, values = block_size(length * groups, ROWS), block_size(value.dim, VALUES)
    with torch.cuda.device_of(rotated):  # Triton launches on the current device
        _attend[(batch * kv_heads, block_count(length * groups, rows), block_count(value.dim, values))](
            *(
                rotated,
                *key.arguments(),
                *value.arguments(),
                key.levels,
                key.units,
                log_weight,
                evicted_at,
                out,
                normalizer,
            ),
            *(kv_heads, groups, length, tokens, key.dim, value.dim, scaling),
            SHARED=log_weight.ndim == 2,
            KEY_BLOCK=key.block,
            VALUE_BLOCK=value.block,
            VALUES=values,
            VALUE_BLOCKS=triton.next_power_of_2(value.blocks),
            ROWS=rows,
            TOKENS=32,
            PRECISION=PRECISION,
            num_stages=1,
        )
    return out, normalizer


@triton.jit
def _attend(
    rotated,  # [B, H, L, KEY_DIM + 1]
    key,  # [units, S, bytes]
    key_scale,  # [units, S, blocks]
    key_bits,  # [blocks], or [kv_heads, blocks] with the stride
    key_bits_head,
    key_bytes,
    value,  # [units, S, bytes]
    value_scale,  # [units, S, blocks]
    value_bits,  # likewise
    value_bits_head,
    value_bytes,
    levels,
    scale_units,
    log_weight,  # [B, S] if SHARED, or [units, S]
    evicted_at,  # [units, S] or None
    out,  # [B, H, L, dv], to be filled
    normalizer,  # [B, H, L], to be filled
    kv_heads,
    groups,
    length,
    tokens,
    key_dim,
    value_dim,
    scaling,
    SHARED: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
    VALUE_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per unit, a KV head of a batch row, block of rows and block of values; rows are the queries of the
    group, token by token."""
    unit = tl.program_id(0).to(tl.int64)
    batch, kv_head = unit // kv_heads, unit % kv_heads
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    query = row // groups
    place = (unit * groups + row % groups) * length + query
    is_row = query < length
    t, k = tl.arange(0, TOKENS), tl.arange(0, LEAST)
    n = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_number, is_value = k < KEY_BLOCK, n < value_dim
    key_blocks, value_blocks = key_dim // KEY_BLOCK, value_dim // VALUE_BLOCK

    key_bits += kv_head * key_bits_head
    value_bits += kv_head * value_bits_head
    key += unit * tokens * key_bytes
    key_scale += unit * tokens * key_blocks
    value_scale += unit * tokens * value_blocks + n // VALUE_BLOCK
    log_weight += (batch if SHARED else unit) * tokens
    rotated += place * (key_dim + 1)
    beside = tl.load(rotated + key_dim, mask=is_row, other=0.0)
    every = tl.arange(0, VALUE_BLOCKS)
    sizes = tl.load(value_bits + every, mask=every < value_blocks, other=0).to(tl.int32) * (VALUE_BLOCK // 8)
    before = tl.where(every[None, :] < (n // VALUE_BLOCK)[:, None], sizes[None, :], 0)
    value += unit * tokens * value_bytes + tl.sum(before, axis=1)
    bits = tl.load(value_bits + n // VALUE_BLOCK, mask=is_value, other=1).to(tl.int32)

    best = tl.full([ROWS], _NOTHING, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, VALUES], tl.float32)
    places = tokens - length  # of the tier
    start = 0
    if evicted_at is None:
        start = tl.program_id(1) * ROWS // groups + 1  # what the first row sees first
    end = tl.minimum(tokens, places + ((tl.program_id(1) + 1) * ROWS - 1) // groups + 1)
    for begin in range(start, end, TOKENS):
        j = begin + t
        is_token = j < end
        weight = tl.load(log_weight + j, mask=is_token, other=_NOTHING)
        goes = j
        if evicted_at is not None:
            goes = tl.load(evicted_at + unit * tokens + j, mask=is_token, other=0)

        scores = tl.zeros([ROWS, TOKENS], tl.float32)
        codes = key + j * key_bytes
        for block in range(0, key_blocks):
            block_bits = tl.load(key_bits + block).to(tl.int32)
            here = is_row[:, None] & is_number[None, :]
            queries = tl.load(rotated[:, None] + (block * KEY_BLOCK + k)[None, :], mask=here, other=0.0)
            found = products(queries, codes, block_bits, levels, is_token, KEY_BLOCK, PRECISION)
            scores += found * units_of(key_scale + j * key_blocks + block, scale_units, is_token)[None, :]
            codes += block_bits * (KEY_BLOCK // 8)
        scores = (scores + beside[:, None]) * scaling + weight[None, :]
        sees = (
            ((j - places)[None, :] <= query[:, None]) & (query[:, None] < goes[None, :]) & (weight > _NOTHING)[None, :]
        )
        scores = tl.where(sees, scores, float("-inf"))

        top = tl.maximum(best, tl.max(scores, axis=1))
        left, shares = tl.exp(best - top), tl.exp(scores - top[:, None])
        here = is_token[:, None] & is_value[None, :]
        values = levels_of(
            value[None, :] + (j * value_bytes)[:, None], n % VALUE_BLOCK, bits, levels, here, VALUE_BLOCK
        )
        values *= units_of(value_scale[None, :] + (j * value_blocks)[:, None], scale_units, here)
        total = left[:, None] * total + tl.dot(shares, values, input_precision=PRECISION)
        mass = left * mass + tl.sum(shares, axis=1)
        best = top

    mass = tl.where(mass == 0.0, 1.0, mass)  # who sees nothing gets zeros, and LOG_ZERO
    if tl.program_id(2) == 0:
        tl.store(normalizer + place, best + tl.log(mass), mask=is_row)
    here = is_row[:, None] & is_value[None, :]
    tl.store(out + place[:, None] * value_dim + n[None, :], total / mass[:, None], mask=here)
