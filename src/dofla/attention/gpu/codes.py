"""Vectors in few bits, as the Triton kernels take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dofla.attention.coding.coder import Coder
from dofla.attention.coding.levels import TABLES, placed

if TYPE_CHECKING:
    from dofla.attention.gpu.joint_coder import JointCoder


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
