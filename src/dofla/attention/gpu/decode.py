"""Numbers from their codes, as Triton kernels read them: coding/blocks.py and the windows of coding/trellis.py.
Importing this file needs triton.

The bits of a block are a ring, the last number's the lowest. So the window of a number, its own code with those before
it in higher bits, is six neighboring bits, from where its own code begins: two bytes have them, whatever the bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(16)
"""Numbers that a product of matrices takes at least: as many as a block has, or twice as many."""


@triton.jit
def levels_of(codes, n, bits, levels, mask, BLOCK: tl.constexpr):
    """Whole numbers [T, N], 0 where masked.

    ``codes`` [T, N or 1] is where the codes of their blocks begin, ``n`` [N] which numbers of a block they are,
    ``bits`` [N] or a scalar those of each.
    """
    bit = (BLOCK - 1 - n) * bits
    low, shift = bit // 8, bit % 8
    high = (low + 1) % (bits * (BLOCK // 8))
    lower = tl.load(codes + low[None, :], mask=mask, other=0).to(tl.int32)
    higher = tl.load(codes + high[None, :], mask=mask, other=0).to(tl.int32)
    window = ((lower | (higher << 8)) >> shift[None, :]) & 63
    first = (bits - 1) * 64 + tl.zeros_like(n)
    return tl.load(levels + first[None, :] + window, mask=mask, other=0.0)


@triton.jit
def units_of(scales, units, mask):
    """The units of integers, from ``units`` [256], for the scale bytes at the pointers ``scales``; 0 where masked."""
    return tl.load(units + tl.load(scales, mask=mask, other=0).to(tl.int32), mask=mask, other=0.0)


@triton.jit
def products(queries, codes, bits, levels, is_token, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """Products [R, T], float32, of queries [R, LEAST] and the integers of one block of the keys at ``codes`` [T]."""
    n = tl.arange(0, LEAST)
    here = is_token[:, None] & (n < BLOCK)[None, :]
    keys = levels_of(codes[:, None], n % BLOCK, bits, levels, here, BLOCK)
    return tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision=PRECISION)
