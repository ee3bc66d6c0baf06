"""Arithmetic that gives the same bits everywhere, as the Triton kernels do it: eight_bits.py and coding/blocks.py."""

import triton
import triton.language as tl

_NO_FRACTION = tl.constexpr(2.0**23)
"""From here on numbers of float32 are whole."""


@triton.jit
def at(bytes, start: tl.constexpr, type: tl.constexpr):
    """Where the numbers of a type begin in a row of bytes."""
    return (bytes + start).to(tl.pointer_type(type))


@triton.jit
def rounded(x):
    """To integers, halves to even ones."""
    size = tl.abs(x)
    near = (size + _NO_FRACTION) - _NO_FRACTION
    return tl.where(size < _NO_FRACTION, tl.where(x < 0, -near, near), x)


@triton.jit
def power_of_two(exponent):
    """2 ** exponent, float32, of int32 from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_of(x):
    """The exponent that frexp gives, for float32 that is not negative: 0 for 0, but -126 for all else below 2⁻¹²⁶."""
    found = (x.to(tl.int32, bitcast=True) >> 23) - 126
    return tl.where(x == 0.0, 0, found)


@triton.jit
def packed(x):
    """A vector in int8: integers from -127 to 127, and the exponent of what one is worth (eight_bits.pack)."""
    exponent = exponent_of(tl.max(tl.abs(x), axis=0)) - 7
    exponent = tl.minimum(tl.maximum(exponent, -120), 120)
    numbers = rounded(x * power_of_two(-exponent))
    return tl.minimum(tl.maximum(numbers, -127.0), 127.0), exponent


@triton.jit
def whole(x):
    """Blocks [n, N] as integers up to 256, and what one is worth in each [n] (coding/blocks.py)."""
    exponent = exponent_of(tl.max(tl.abs(x), axis=1))
    exponent = tl.minimum(tl.maximum(exponent, -100), 100) - 8
    return rounded(x * power_of_two(-exponent)[:, None]), power_of_two(exponent)
