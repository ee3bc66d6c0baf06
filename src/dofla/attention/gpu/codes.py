"""Coders and vectors in few bits, as the Triton kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary, proxy, ref

import torch
from torch import Tensor

from dofla.attention.coding.coder import Coder
from dofla.attention.coding.levels import TABLES, placed
from dofla.attention.rows import Rows


class JointCoder:
    """The coders of one side of several groups, with vectors of one size and one number of bits, as one of all their
    heads. Blocks have bits of their own in each head."""

    def __init__(self, coders: Sequence[Coder]) -> None:
        self.coders, self.dim, self.block = list(coders), coders[0].dim, coders[0].block
        self.bytes_per_token = coders[0].bytes_per_token
        self._made_of: list[tuple[Tensor, int]] = []
        self.constants = torch.empty(0)

    def update(self) -> None:
        """Take the coders' constants, if they are others than before, or were written since; where there is room for
        them in the same place, because CUDA graphs read there."""
        # As an attribute it takes ten times as long to find; torch's type says that a buffer may be None.
        found: list[Tensor] = [coder._buffers["constants"] for coder in self.coders]  # type: ignore[misc]
        now = [(x, 0 if x.is_inference() else x._version) for x in found]
        if self._made_of and all(x is y and n == m for (x, n), (y, m) in zip(now, self._made_of, strict=True)):
            return
        bits = [coder.bits.expand(coder.heads, -1) for coder in self.coders]
        names = ("rotation", "fineness", "back", "mean", "middle")
        parts = [torch.cat([getattr(coder, name) for coder in self.coders]) for name in names]
        parts.append(torch.cat(bits))
        rows = Rows([(part.shape, part.dtype) for part in parts])
        constants, self.starts, self._made_of = rows.joined(parts), rows.starts, now
        if constants.shape == self.constants.shape and constants.device == self.constants.device:
            with torch.inference_mode():
                self.constants.copy_(constants)
        else:
            self.constants = constants


_JOINT: WeakKeyDictionary[Coder, list[tuple[list[ref[Coder]], JointCoder]]] = WeakKeyDictionary()
"""Coders as one, by the first of them: those that each is made of, and it."""


def joint(coders: Sequence[Coder]) -> JointCoder:
    """Coders as one, with their constants as they are now; made once. It holds none of them, and goes with the
    first."""
    known = _JOINT.setdefault(coders[0], [])
    found = next((one for made_of, one in known if [own() for own in made_of] == list(coders)), None)
    if found is None:
        found = JointCoder([proxy(own) for own in coders])  # type: ignore[misc]  # who has a proxy has a coder
        known.append(([ref(own) for own in coders], found))
    found.update()
    return found


class Coding(NamedTuple):
    """A coder, as far as it is known when a kernel is compiled: one argument, a ``tl.constexpr``. Kernels name
    the fields that they use first, because Triton up to 3.7 takes no field where it expects a constant."""

    dim: int  # numbers of a vector
    padded: int  # the power of two that holds them, 16 at least
    block: int  # numbers of a block, 8 or 16
    blocks: int  # of a vector
    padded_blocks: int  # the power of two that holds them
    size: int  # bytes of a vector's codes
    rotation: int  # where this part of the constants begins; and so on
    fineness: int
    back: int
    mean: int
    middle: int
    bits: int

    @classmethod
    def of(cls, coder: Coder | JointCoder) -> Coding:
        """The coding of a coder."""
        blocks = coder.dim // coder.block
        padded, padded_blocks = max(16, 1 << (coder.dim - 1).bit_length()), 1 << (blocks - 1).bit_length()
        size = coder.bytes_per_token - blocks
        return cls(coder.dim, padded, coder.block, blocks, padded_blocks, size, *coder.starts)


def coded(coder: Coder, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [B, Hkv, n, bytes] and scales [B, Hkv, n, blocks] in one piece, and the constants of their coder."""
    return codes.contiguous(), scales.contiguous(), coder.constants


def tables_on(device: torch.device) -> Tensor:
    """All that kernels look up, float32 (coding/levels.py)."""
    return placed(TABLES, device)
