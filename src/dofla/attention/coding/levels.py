"""The numbers that codes stand for: levels of a normal variable, and scales."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

MOST_BITS = 5
UNIT = 32
"""Levels are whole numbers, this many to a standard deviation."""

_SCALE_STEP = 16
"""Scales to a factor of two: at most 2.2 % off, for blocks from a 256th of what calibration saw to 256 times that."""
_SCALES = torch.tensor([2.0 ** ((n - 128) / _SCALE_STEP) / UNIT for n in range(256)], dtype=torch.float32)
_SQUARE_BORDERS = torch.tensor([4.0 ** ((n - 127.5) / _SCALE_STEP) / UNIT**2 for n in range(255)], dtype=torch.float32)
"""Between the squares of scales: a square root is not everywhere the nearest number."""


def _density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _share(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


@cache
def levels(bits: int) -> Tensor:
    """The 2 ** bits levels of least squared error for a normal variable (Lloyd 1982, Max 1960), in ``1 / UNIT``."""
    count = 2**bits
    found = [3 * (2 * n + 1 - count) / count for n in range(count)]
    for _ in range(500):
        borders = [-math.inf, *((a + b) / 2 for a, b in pairwise(found)), math.inf]
        found = [(_density(a) - _density(b)) / (_share(b) - _share(a)) for a, b in pairwise(borders)]
    return torch.tensor([round(UNIT * x) for x in found], dtype=torch.float32)


@cache
def borders(bits: int) -> Tensor:
    """Between the levels."""
    found = levels(bits)
    return (found[1:] + found[:-1]) / 2


@cache
def distortion(bits: int) -> float:
    """Mean squared error of a standard normal variable at its levels."""
    if bits == 0:
        return 1.0
    found = (levels(bits) / UNIT).tolist()
    edges = [-math.inf, *((a + b) / 2 for a, b in pairwise(found)), math.inf]
    return 1 - sum(
        level * (2 * (_density(a) - _density(b)) - level * (_share(b) - _share(a)))
        for level, a, b in zip(found, edges, edges[1:], strict=False)
    )


def tables() -> Tensor:
    """All of these as one array, as the compiled kernels take them: levels and borders by bits in rows of 32, scales
    and the borders of their squares in rows of 256, the rest infinite."""
    found = torch.full((2 * MOST_BITS * 32 + 2 * 256,), torch.inf)
    of_bits, of_scales = found[: 2 * MOST_BITS * 32].view(2, MOST_BITS, 32), found[2 * MOST_BITS * 32 :].view(2, 256)
    for bits in range(1, MOST_BITS + 1):
        for row, numbers in enumerate((levels(bits), borders(bits))):
            of_bits[row, bits - 1, : len(numbers)] = numbers
    for row, numbers in enumerate((_SCALES, _SQUARE_BORDERS)):
        of_scales[row, : len(numbers)] = numbers
    return found


def scale_code(square: Tensor) -> Tensor:
    """Scales, of which the squares are given, as one byte."""
    return torch.bucketize(square.contiguous(), _SQUARE_BORDERS.to(square.device)).to(torch.uint8)


def scale_of(code: Tensor) -> Tensor:
    """The reverse of :func:`scale_code`, float32."""
    return _SCALES.to(code.device)[code.int()]
