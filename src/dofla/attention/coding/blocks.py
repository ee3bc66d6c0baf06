"""A block of numbers in few bits: a trellis code and a scale, by exact arithmetic; and how bits become bytes."""

import torch
from torch import Tensor

from dofla.attention.coding.levels import constant, levels, placed, scale_code, scale_of
from dofla.attention.coding.trellis import search, windows
from dofla.attention.constants import FINE, UNIT
from dofla.attention.eight_bits import power_of_two
from dofla.attention.state import widest

_WHOLE = 256
"""Blocks become integers up to this before they are coded. Sums of products of those with levels are below 2²⁴ for
blocks of up to 64 numbers, so float32 adds them without rounding, in any order."""


def whole(x: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks [..., n] as integers (of float32) up to :data:`_WHOLE` and a power of two [..., 1] for each."""
    exponent = torch.frexp(x.abs().amax(-1, keepdim=True)).exponent.clamp(-100, 100) - _WHOLE.bit_length() + 1
    exponent = exponent.squeeze(-1)
    return (x * power_of_two(-exponent)).round(), power_of_two(exponent)


def encode(numbers: Tensor, unit: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Blocks of whole ``numbers`` [..., n] times ``unit`` [..., 1] as codes [..., n] below 2 ** bits and the byte of a
    scale [..., 1]: levels near the numbers in units of the block's root mean square, then the scale that makes them as
    long as the block is.
    (With one of least squares they are shorter, the more so the fewer the bits, and all scores on one side.)
    """
    squares = numbers.square().sum(-1, keepdim=True)
    # torch has float32 roots from a library that may round the last bit either way; of doubles, that bit is lost.
    size = (squares / numbers.shape[-1]).to(widest(squares)).sqrt().float()
    known = placed(levels(bits), numbers.device)
    codes = search((numbers * (FINE * UNIT) / size.clamp_min(1e-3)).round(), known, bits)
    found = known[windows(codes, bits)]
    return codes, scale_code(squares / found.square().sum(-1, keepdim=True) * unit.square())


def decode(codes: Tensor, scale: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Whole numbers [..., n] and their unit [..., 1], as :func:`encode` takes them."""
    return placed(levels(bits), codes.device)[windows(codes, bits)], scale_of(scale)


_PLACES = constant([2**n for n in range(8)], torch.int64)


def to_bytes(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., n] of a few bits as bytes [..., bits · n / 8], the last one lowest: above each are those before."""
    digits = codes.flip(-1).unsqueeze(-1) >> torch.arange(bits, device=codes.device, dtype=torch.uint8) & 1
    return (digits.flatten(-2).unflatten(-1, (-1, 8)) * placed(_PLACES, codes.device)).sum(-1).to(torch.uint8)


def from_bytes(packed: Tensor, bits: int) -> Tensor:
    """The reverse of :func:`to_bytes`."""
    digits = packed.unsqueeze(-1) >> torch.arange(8, device=packed.device, dtype=torch.uint8) & 1
    places = placed(_PLACES, packed.device)[:bits]
    return (digits.flatten(-2).unflatten(-1, (-1, bits)) * places).sum(-1).to(torch.uint8).flip(-1)
