"""Vectors in few bits, as the Triton kernels take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dofla.attention.coding.coder import Coder
from dofla.attention.coding.levels import TABLES, placed

if TYPE_CHECKING:
    from dofla.attention.gpu.side_by_side import JointCoder


class Coding(NamedTuple):
    """A coder's tier, as far as it is known when a kernel is compiled: one argument, a ``tl.constexpr``. Kernels name
    the fields that they use first, because Triton up to 3.7 takes no field where it expects a constant.

    Attributes:
        dim: numbers of a vector.
        padded: the power of two that holds them, 16 at least.
        block: numbers of a block, 8 or 16.
        blocks: of a vector.
        padded_blocks: the power of two that holds them.
        size: bytes of a vector's codes.
        turn, fineness, back, mean, middle: where these parts of the constants begin.
        bits: where the bits of the tier's blocks begin there.
    """

    dim: int
    padded: int
    block: int
    blocks: int
    padded_blocks: int
    size: int
    turn: int
    fineness: int
    back: int
    mean: int
    middle: int
    bits: int

    @classmethod
    def of(cls, coder: Coder | JointCoder, tier: int = 0) -> Coding:
        """The coding of a coder's tier."""
        blocks, (turn, fineness, back, mean, middle, bits) = coder.dim // coder.block, coder.starts
        return cls(
            dim=coder.dim,
            padded=max(16, 1 << (coder.dim - 1).bit_length()),
            block=coder.block,
            blocks=blocks,
            padded_blocks=1 << (blocks - 1).bit_length(),
            size=coder.bytes_per_token(tier) - blocks,
            turn=turn,
            fineness=fineness,
            back=back,
            mean=mean,
            middle=middle,
            bits=bits + tier * blocks,
        )


@dataclass(frozen=True)
class Codes:
    """n vectors of a tier, and what their codes stand for.

    Attributes:
        codes: [B, Hkv, n, bytes], uint8.
        scales: [B, Hkv, n, blocks], uint8.
        constants: of their coder.
        coding: likewise.
    """

    codes: Tensor
    scales: Tensor
    constants: Tensor
    coding: Coding

    @classmethod
    def of(cls, coder: Coder, codes: Tensor, scales: Tensor, tier: int) -> Codes:
        """Codes and scales of a coder's tier."""
        return cls(codes, scales, coder.constants, Coding.of(coder, tier))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Codes and scales in one piece, and the constants."""
        return self.codes.contiguous(), self.scales.contiguous(), self.constants


def tables_on(device: torch.device) -> Tensor:
    """All that kernels look up, float32 (coding/levels.py)."""
    return placed(TABLES, device)
