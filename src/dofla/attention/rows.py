"""Several tensors as one: side by side in rows of bytes, which are handed on, copied and written as they are."""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from dofla.attention.constants import ALIGNMENT


class Rows:
    """Where the parts of a row of so many ``bytes`` stand, from their shapes and types without the dimensions of the
    rows; each begins at a multiple of :data:`ALIGNMENT` bytes."""

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
        """Rows [..., bytes], uint8, of parts [..., shape], with zeros between them, by one operation: a GPU takes as
        long for each of many copies."""
        batch = parts[0].shape[: parts[0].ndim - len(self.parts[0][0])]
        zeros = torch.zeros(*batch, ALIGNMENT, dtype=torch.uint8, device=parts[0].device)
        pieces: list[Tensor] = []
        for part, start, end in zip(parts, self.starts, [*self.starts[1:], self.bytes], strict=True):
            pieces.append(part.flatten(len(batch)).view(torch.uint8))
            pieces.append(zeros[..., : end - start - pieces[-1].shape[-1]])
        return torch.cat(pieces, -1)
