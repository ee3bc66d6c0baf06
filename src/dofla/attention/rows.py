"""Several tensors as one: side by side in rows of bytes, which are handed on, copied and written as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 16
"""Of where each part begins, in bytes: a vector of eight bits is read whole (fading.h, ``Cut``, has the same)."""


class Rows:
    """Where the parts of a row stand.

    Args:
        parts: shape and type of each, without the dimensions of the rows.

    Attributes:
        bytes: of a row.
    """

    def __init__(self, parts: Sequence[tuple[Sequence[int], torch.dtype]]) -> None:
        self.parts = [(tuple(shape), dtype) for shape, dtype in parts]
        sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in self.parts)
        *self.starts, self.bytes = accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)

    def part(self, rows: Tensor, n: int) -> Tensor:
        """Part ``n`` [..., shape] of rows [..., bytes], uint8: a view."""
        (shape, dtype), start = self.parts[n], self.starts[n]
        return rows[..., start : start + math.prod(shape) * dtype.itemsize].view(dtype).unflatten(-1, shape)

    def cut(self, rows: Tensor) -> list[Tensor]:
        """All of them."""
        return [self.part(rows, n) for n in range(len(self.parts))]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Rows [..., bytes], uint8, of parts [..., shape], with zeros between them."""
        found = []
        for part, (shape, _), (start, end) in zip(parts, self.parts, pairwise([*self.starts, self.bytes]), strict=True):
            flat = part.flatten(part.ndim - len(shape)).contiguous().view(torch.uint8)
            found.append(F.pad(flat, (0, end - start - flat.shape[-1])))
        return torch.cat(found, -1)
