"""Vectors in few bits, as the Triton kernels take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from dofla.attention.coding.coder import Coder

if TYPE_CHECKING:
    from dofla.attention.gpu.side_by_side import JointCoder


@dataclass(frozen=True)
class Codes:
    """n vectors of a tier, and what their codes stand for.

    Attributes:
        codes: [B, Hkv, n, bytes], uint8.
        scales: [B, Hkv, n, blocks], uint8.
        bits: of each number of a block [blocks], uint8, or [Hkv, blocks] if heads differ.
        block: numbers of a block, 8 or 16.
        levels: what windows stand for, by bits from one on, integers [bits · 64], float32.
        units: what the bytes of scales stand for [256], float32.
    """

    codes: Tensor
    scales: Tensor
    bits: Tensor
    block: int
    levels: Tensor
    units: Tensor

    @classmethod
    def of(cls, coder: Coder | JointCoder, codes: Tensor, scales: Tensor, tier: int) -> Codes:
        """Codes and scales of a coder's tier."""
        bits = coder.bits[tier] if isinstance(coder, Coder) else coder.bits
        return cls(codes, scales, bits, coder.block, *coder.tables[:2])

    @property
    def blocks(self) -> int:
        """The number of blocks of a vector."""
        return self.scales.shape[-1]

    @property
    def dim(self) -> int:
        """Numbers of a vector."""
        return self.blocks * self.block

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """Codes and scales in one piece, bits, how far those of a head are from the next one's, and bytes of a vector's
        codes."""
        per_head = self.blocks if self.bits.ndim == 2 else 0
        return self.codes.contiguous(), self.scales.contiguous(), self.bits, per_head, self.codes.shape[-1]
