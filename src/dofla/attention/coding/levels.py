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

_SCALE_STEP = 8
"""Scales to a factor of two: at most 4.4 % off."""
_SCALES = torch.tensor([2.0 ** ((n - 128) / _SCALE_STEP) for n in range(256)], dtype=torch.float32)
_SCALE_BORDERS = torch.tensor([2.0 ** ((n - 127.5) / _SCALE_STEP) for n in range(255)], dtype=torch.float32)


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


def scale_code(scale: Tensor) -> Tensor:
    """Scales > 0 as one byte."""
    return torch.bucketize(scale.contiguous(), _SCALE_BORDERS.to(scale.device)).to(torch.uint8)


def scale_of(code: Tensor) -> Tensor:
    """The reverse of :func:`scale_code`, float32."""
    return _SCALES.to(code.device)[code.int()]
