"""Numbers from their codes, as Triton kernels read them: coding/blocks.py and the windows of coding/trellis.py.

The bits of a block are a ring, the last number's the lowest. So the window of a number, its own code with those before
it in higher bits, is six neighboring bits, from where its own code begins: two bytes have them, whatever the bits.
"""

import triton
import triton.language as tl

from dofla.attention.coding.levels import SCALES_AT

_SCALES_AT = tl.constexpr(SCALES_AT)
LEAST = tl.constexpr(16)
"""Numbers that a product of matrices takes at least: as many as a block has, or twice as many."""


@triton.jit
def levels_of(codes, n, bits, tables, mask, BLOCK: tl.constexpr):
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
    return tl.load(tables + first[None, :] + window, mask=mask, other=0.0)


@triton.jit
def units_of(scales, tables, mask):
    """The units of integers for the scale bytes at the pointers ``scales``; 0 where masked."""
    return tl.load(tables + _SCALES_AT + tl.load(scales, mask=mask, other=0).to(tl.int32), mask=mask, other=0.0)


@triton.jit
def keys_of(codes, bits, tables, is_token, BLOCK: tl.constexpr):
    """The integers [LEAST, T], float32, of one block of the keys at ``codes`` [T]."""
    n = tl.arange(0, LEAST)
    here = is_token[:, None] & (n < BLOCK)[None, :]
    return tl.trans(levels_of(codes[:, None], n % BLOCK, bits, tables, here, BLOCK))


@triton.jit
def starts_of(n, widths, CODER: tl.constexpr):
    """Where in the codes of a vector those of the blocks begin that hold the numbers ``n`` [N], and their bits, where
    ``widths`` are those of all blocks."""
    BLOCK: tl.constexpr = CODER.block
    BLOCKS: tl.constexpr = CODER.padded_blocks
    every = tl.arange(0, BLOCKS)
    sizes = tl.load(widths + every, mask=every < CODER.blocks, other=0).to(tl.int32) * (BLOCK // 8)
    before = tl.sum(tl.where(every[None, :] < (n // BLOCK)[:, None], sizes[None, :], 0), axis=1)
    return before, tl.load(widths + n // BLOCK, mask=n < CODER.dim, other=1).to(tl.int32)


@triton.jit
def integers_of(codes, scales, n, before, bits, tables, is_token, CODER: tl.constexpr):
    """The numbers ``n`` of vectors, whole blocks, of the codes and scales at ``codes`` and ``scales`` [T]: integers
    [T, N], float32, and the units of their blocks [T, blocks]. ``before`` and ``bits`` are of :func:`starts_of`."""
    BLOCK: tl.constexpr = CODER.block
    BLOCKS: tl.constexpr = n.shape[0] // BLOCK
    here = is_token[:, None] & (n < CODER.dim)[None, :]
    integers = levels_of(codes[:, None] + before[None, :], n % BLOCK, bits, tables, here, BLOCK)
    block = tl.min(n, axis=0) // BLOCK + tl.arange(0, BLOCKS)
    here = is_token[:, None] & (block < CODER.blocks)[None, :]
    return integers, units_of(scales[:, None] + block[None, :], tables, here)


@triton.jit
def values_of(codes, scales, n, before, bits, tables, is_token, CODER: tl.constexpr):
    """The same as numbers [T, N], float32."""
    TOKENS: tl.constexpr = codes.shape[0]
    NUMBERS: tl.constexpr = n.shape[0]
    BLOCKS: tl.constexpr = NUMBERS // CODER.block
    integers, units = integers_of(codes, scales, n, before, bits, tables, is_token, CODER)
    return tl.reshape(tl.reshape(integers, [TOKENS, BLOCKS, CODER.block]) * units[:, :, None], [TOKENS, NUMBERS])
