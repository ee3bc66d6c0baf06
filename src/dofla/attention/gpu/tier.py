"""Attention to the tier of a compressed cache from its codes (coding/tier.py), and vectors of codes rotated back
(coding/coder.py), as Triton kernels.

Codes become numbers in registers, some tokens at a time, and are forgotten as soon as all queries of the program have
seen them (online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dofla.attention.coding import CodedTokens, Coder
from dofla.attention.coding.coder import Codes
from dofla.attention.constants import LOG_ZERO
from dofla.attention.gpu import block_count, block_size
from dofla.attention.gpu.codes import Coding, coded, tables_on
from dofla.attention.gpu.decode import LEAST, keys_of, starts_of, units_of, values_of
from dofla.attention.gpu.numbers import at

ROWS = 64
"""Queries of a program at most, those of all heads of a group counted."""

VALUES = 64
"""Numbers of a value of a program at most: what fits into its registers."""

_VECTORS = 32
"""Vectors of a program that rotates them back."""

PRECISION = "tf32x3" if torch.version.hip is None else "ieee"
"""Input precision of float32 products: three in TF32, on the matrix units, are as accurate as one in float32."""

_PRECISION = tl.constexpr(PRECISION)
_NOTHING = tl.constexpr(LOG_ZERO)


def attend(
    key: Coder, value: Coder, rotated: Tensor, line: CodedTokens, evicted_at: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """:meth:`dofla.attention.coding.operations.CodeOperations.attend`, in float32; ``evicted_at`` is int32."""
    batch, heads, length, _ = rotated.shape
    kv_heads, tokens = line.score.shape[1:]
    groups = heads // kv_heads
    out = rotated.new_empty(batch, heads, length, value.dim)
    normalizer = rotated.new_empty(batch, heads, length)
    rows, values = block_size(length * groups, ROWS), block_size(value.dim, VALUES)
    with torch.cuda.device_of(rotated):  # Triton launches on the current device
        _attend[(batch * kv_heads, block_count(length * groups, rows), block_count(value.dim, values))](
            *(rotated.contiguous(), *coded(key, line.key, line.key_scale), *coded(value, line.value, line.value_scale)),
            *(tables_on(out.device), line.log_weight.contiguous(), evicted_at, out, normalizer),
            *(kv_heads, groups, length, tokens, scaling),
            KEY=Coding.of(key),
            VALUE=Coding.of(value),
            VALUES=values,
            ROWS=rows,
            TOKENS=32,
            num_stages=1,
        )
    return out, normalizer


@triton.jit
def _attend(
    rotated,  # [B, H, L, key dim + 1]
    key,  # [units, S, bytes]
    key_scale,  # [units, S, blocks]
    key_constants,
    value,  # [units, S, bytes]
    value_scale,  # [units, S, blocks]
    value_constants,
    tables,
    log_weight,  # [units, S]
    evicted_at,  # [units, S]
    out,  # [B, H, L, dv], to be filled
    normalizer,  # [B, H, L], to be filled
    kv_heads,
    groups,
    length,
    tokens,
    scaling,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program per unit, block of rows (the queries of its group, token by token) and block of values."""
    KEY_DIM: tl.constexpr = KEY.dim
    KEY_BLOCK: tl.constexpr = KEY.block
    KEY_BLOCKS: tl.constexpr = KEY.blocks
    VALUE_DIM: tl.constexpr = VALUE.dim
    unit = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    query = row // groups
    place = (unit * groups + row % groups) * length + query
    is_row = query < length
    n = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    t, k = tl.arange(0, TOKENS), tl.arange(0, LEAST)

    key_bits, value_bits = at(key_constants, KEY.bits, tl.uint8), at(value_constants, VALUE.bits, tl.uint8)
    before, bits = starts_of(n, value_bits, VALUE)
    key += unit * tokens * KEY.size
    key_scale += unit * tokens * KEY.blocks
    value += unit * tokens * VALUE.size
    value_scale += unit * tokens * VALUE.blocks
    log_weight += unit * tokens
    rotated += place * (KEY_DIM + 1)
    beside = tl.load(rotated + KEY_DIM, mask=is_row, other=0.0)

    best = tl.full([ROWS], _NOTHING, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, VALUES], tl.float32)
    places = tokens - length  # of the tier
    end = tl.minimum(tokens, places + ((tl.program_id(1) + 1) * ROWS - 1) // groups + 1)
    for begin in range(0, end, TOKENS):
        j = begin + t
        is_token = j < end
        weight = tl.load(log_weight + j, mask=is_token, other=_NOTHING)
        goes = tl.load(evicted_at + unit * tokens + j, mask=is_token, other=0)

        scores = tl.zeros([ROWS, TOKENS], tl.float32)
        codes = key + j * KEY.size
        for block in range(0, KEY_BLOCKS):
            block_bits = tl.load(key_bits + block).to(tl.int32)
            here = is_row[:, None] & (k < KEY_BLOCK)[None, :]
            queries = tl.load(rotated[:, None] + (block * KEY_BLOCK + k)[None, :], mask=here, other=0.0)
            found = tl.dot(queries, keys_of(codes, block_bits, tables, is_token, KEY_BLOCK), input_precision=_PRECISION)
            scores += found * units_of(key_scale + j * KEY_BLOCKS + block, tables, is_token)[None, :]
            codes += block_bits * (KEY_BLOCK // 8)
        scores = (scores + beside[:, None]) * scaling + weight[None, :]
        sees = (
            ((j - places)[None, :] <= query[:, None]) & (query[:, None] < goes[None, :]) & (weight > _NOTHING)[None, :]
        )
        scores = tl.where(sees, scores, float("-inf"))
        values = values_of(
            value + j * VALUE.size, value_scale + j * VALUE.blocks, n, before, bits, tables, is_token, VALUE
        )
        best, mass, total = online_softmax(best, mass, total, scores, values)

    mass = tl.where(mass == 0.0, 1.0, mass)  # who sees nothing gets zeros, and LOG_ZERO
    if tl.program_id(2) == 0:
        tl.store(normalizer + place, best + tl.log(mass), mask=is_row)
    here = is_row[:, None] & (n < VALUE_DIM)[None, :]
    tl.store(out + place[:, None] * VALUE_DIM + n[None, :], total / mass[:, None], mask=here)


@triton.jit
def online_softmax(best, mass, total, scores, values):
    """The largest score [R], the sum of weights [R] and the weighted sum of values [R, N], with those of further
    tokens, whose ``scores`` are [R, T] and ``values`` [T, N]."""
    top = tl.maximum(best, tl.max(scores, axis=1))
    left, shares = tl.exp(best - top), tl.exp(scores - top[:, None])
    total = left[:, None] * total + tl.dot(shares, values, input_precision=_PRECISION)
    return top, left * mass + tl.sum(shares, axis=1), total


def unrotated(coder: Coder, codes: Codes) -> Tensor:
    """Vectors [B, Hkv, n, d], float32, of codes."""
    (batch, heads, tokens), coding = codes[0].shape[:3], Coding.of(coder)
    out = torch.empty(batch, heads, tokens, coder.dim, dtype=torch.float32, device=codes[0].device)
    with torch.cuda.device_of(out):  # Triton launches on the current device
        _unrotated[(batch * heads, triton.cdiv(tokens, _VECTORS))](
            *(*coded(coder, *codes), tables_on(out.device), out, heads, tokens),
            CODER=coding,
            CHUNK=min(32, coding.padded),
            TOKENS=_VECTORS,
        )
    return out


@triton.jit
def _unrotated(
    codes,  # [units, n, bytes]
    scales,  # [units, n, blocks]
    constants,  # of the coder
    tables,
    out,  # [units, n, dim], to be filled
    heads,
    tokens,
    CODER: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program per KV head of a batch row and some of its vectors."""
    DIM: tl.constexpr = CODER.dim
    PADDED: tl.constexpr = CODER.padded
    unit = tl.program_id(0).to(tl.int64)
    token, v = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, PADDED)
    is_token, is_number = token < tokens, v < DIM
    place, row = unit * tokens + token, unit % heads * DIM + v
    codes, scales = codes + place * CODER.size, scales + place * CODER.blocks
    widths = at(constants, CODER.bits, tl.uint8)
    mean = tl.load(at(constants, CODER.mean, tl.float32) + row, mask=is_number, other=0.0)
    found = tl.zeros([TOKENS, PADDED], tl.float32) + mean[None, :]
    for begin in range(0, DIM, CHUNK):  # rotated @ back.mT
        n = begin + tl.arange(0, CHUNK)
        before, bits = starts_of(n, widths, CODER)
        rotated = values_of(codes, scales, n, before, bits, tables, is_token, CODER)
        back = at(constants, CODER.back, tl.float32) + row[None, :] * DIM + n[:, None]
        back = tl.load(back, mask=(n < DIM)[:, None] & is_number[None, :], other=0.0)
        found += tl.dot(rotated, back, input_precision=_PRECISION)
    tl.store(out + place[:, None] * DIM + v[None, :], found, mask=is_token[:, None] & is_number[None, :])
