"""Vectors in few bits, as the Triton kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Coding(Protocol):
    """The interface of a coder (coding/coder.py) for the kernels; this folder does not import coders.

    Attributes:
        constants: [bytes], uint8.
        starts: offsets in them, in bytes, of the rotation, its fineness, its inverse, the mean, the rotated mean and
            the bits of blocks.
        heads: KV heads.
        dim: numbers of a vector.
        block: numbers of a block, 8 or 16.
        tables: levels by bits in rows of 64, what the bytes of scales stand for [256], and the borders of their squares
            [255], on the coder's device.
    """

    constants: Tensor
    heads: int
    dim: int
    block: int

    @property
    def starts(self) -> Sequence[int]: ...

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]: ...

    def bytes_per_token(self, tier: int) -> int:
        """The bytes of the codes and scales of one vector of one head in a tier."""

    def for_kernels(self, codes: Tensor, scales: Tensor, tier: int) -> Codes:
        """Codes of a tier."""


@dataclass(frozen=True)
class Codes:
    """n vectors of a tier, and what their codes stand for.

    Attributes:
        codes: [B, Hkv, n, bytes], uint8.
        scales: [B, Hkv, n, blocks], uint8.
        bits: of each number of a block [blocks], uint8.
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

    @property
    def blocks(self) -> int:
        """The number of blocks of a vector."""
        return self.scales.shape[-1]

    @property
    def dim(self) -> int:
        """Numbers of a vector."""
        return self.blocks * self.block

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """Codes and scales in one piece, bits, and bytes of a vector's codes."""
        return self.codes.contiguous(), self.scales.contiguous(), self.bits, self.codes.shape[-1]
