"""Numbers from their codes, as Triton kernels read them: coding/blocks.py and the windows of coding/trellis.py.
Importing this file needs triton.

The bits of a block are a ring, the last number's the lowest. So the window of a number, its own code with those before
it in higher bits, is six neighbouring bits, from where its own code begins: two bytes have them, whatever the bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def windows(bits, blocks, n, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Where windows of the numbers ``n`` stand in a vector's codes: the bytes that have their lower and their higher
    bits, and by how many bits to shift; and where levels of so many bits begin."""
    block = n // BLOCK
    every = tl.arange(0, BLOCKS)
    sizes = tl.load(bits + every, mask=every < blocks, other=1).to(tl.int32)[None, :]
    own = tl.sum(tl.where(every[None, :] == block[:, None], sizes, 0), axis=1)
    own = tl.maximum(own, 1)  # of numbers that are not there
    start = tl.sum(tl.where(every[None, :] < block[:, None], sizes, 0), axis=1) * (BLOCK // 8)
    bit = (BLOCK - 1 - n % BLOCK) * own
    low, ring = bit // 8, own * (BLOCK // 8)
    return start + low, start + (low + 1) % ring, bit % 8, (own - 1) * 64


@triton.jit
def whole_numbers(codes, low, high, shift, first, levels, mask):
    """Levels at the places that :func:`windows` gave, of vectors whose codes begin at ``codes``: shapes are those of all
    of these together; 0 where masked."""
    lower = tl.load(codes + low, mask=mask, other=0).to(tl.int32)
    higher = tl.load(codes + high, mask=mask, other=0).to(tl.int32)
    window = ((lower | (higher << 8)) >> shift) & 63
    return tl.load(levels + first + window, mask=mask, other=0.0)


@triton.jit
def units_of(scales, units, mask):
    """What one is worth where the byte of the scale is at ``scales``."""
    return tl.load(units + tl.load(scales, mask=mask, other=0).to(tl.int32), mask=mask, other=0.0)
