"""The numbers that codes stand for: levels and scales."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from dofla.attention.constants import MOST_BITS, UNIT


def constant(numbers: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
    """On the CPU whatever the default device is: the first model that somebody makes imports this module, and that may
    be under ``torch.device("meta")``."""
    return torch.tensor(numbers, dtype=dtype, device="cpu")


_SCALE_STEP = 16
"""Scales to a factor of two: at most 2.2 % off, for blocks from a 256th of what calibration saw to 256 times that."""
_SCALES = constant([2.0 ** ((n - 128) / _SCALE_STEP) / UNIT for n in range(256)])
_SQUARE_BORDERS = constant([4.0 ** ((n - 127.5) / _SCALE_STEP) / UNIT**2 for n in range(255)])
"""Between the squares of scales: a square root is not everywhere the nearest number."""


# fmt: off
_HALF = [
    [-50, -6, 14, 51, -53, -14, -31, 14, -40, 15, -10, 32, 13, 66, -36, 40,
     -8, 52, -62, -26, 8, 40, 40, 78, -79, -28, -13, 22, -17, 12, -21, 8],
    [-39, -5, 22, 63, -69, -23, 8, 39, -57, -23, 5, 42, -39, -5, 22, 60,
     -78, -44, -9, 28, -31, 11, 50, 81, -17, 15, 53, 99, -87, -49, -14, 21],
    [-94, -66, -40, -21, -3, 15, 35, 60, -55, -29, -8, 10, 29, 46, 71, 101,
     -81, -47, -25, -9, 9, 26, 48, 81, -108, -70, -45, -31, -11, 8, 29, 57],
    [-90, -62, -47, -36, -26, -17, -10, -2, 7, 15, 24, 33, 44, 56, 74, 102,
     -74, -50, -37, -27, -17, -9, -1, 7, 16, 25, 35, 45, 57, 67, 84, 120],
    [-122, -92, -75, -64, -55, -48, -43, -37, -32, -28, -23, -19, -15, -11, -7, -4,
     0, 4, 7, 11, 15, 19, 23, 28, 32, 38, 43, 50, 58, 68, 82, 104],
]
# fmt: on
"""Levels of the windows whose first bit is 0, by bits (scripts/trellis_levels.py); the others have their negatives."""
DISTORTION = (1.0, 0.34632, 0.08024, 0.02100, 0.00533, 0.00159)
"""Mean squared error of normal numbers of variance 1, coded in blocks of sixteen, by bits."""


@cache
def levels(bits: int) -> Tensor:
    """The levels that windows of codes of ``bits`` bits stand for [2 ** WINDOW], float32, in units of ``1 / UNIT``."""
    half = constant(_HALF[bits - 1])
    return torch.cat([half, -half.flip(0)])


_OF_BITS = torch.cat([levels(bits) for bits in range(1, MOST_BITS + 1)])
TABLES = torch.cat(
    [_OF_BITS, _OF_BITS.to(torch.int8).view(torch.float32), _SCALES, _SQUARE_BORDERS, constant([torch.inf])]
)
"""All that kernels look up, as one array: levels by bits in rows of 64, as numbers and once more as bytes; scales and
the borders of their squares in rows of 256, of which the last is infinite. A constant, as graphs of torch.compile trace
no cached call."""
SCALES_AT = MOST_BITS * (64 + 16)
"""Where the scales begin in :data:`TABLES`; the borders of their squares are the 256 numbers behind them."""


def placed(table: Tensor, device: torch.device) -> Tensor:
    """A table that does not change, on a device."""
    return table if table.device == device else _copied(table, device)


@cache
def _copied(table: Tensor, device: torch.device) -> Tensor:
    """Once, for the CPU waits for a GPU while it copies something there."""
    with torch.inference_mode(False):
        return table.to(device)


def scale_code(square: Tensor) -> Tensor:
    """Scales, of which the squares are given, as one byte."""
    return torch.bucketize(square.contiguous(), placed(_SQUARE_BORDERS, square.device)).to(torch.uint8)


def scale_of(code: Tensor) -> Tensor:
    """The reverse of :func:`scale_code`, float32."""
    return placed(_SCALES, code.device)[code.int()]
