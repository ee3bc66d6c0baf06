"""The directions that feature maps look along: how they are drawn, and how they are applied."""

import math

import torch
from torch import Tensor

from dofla.attention import Affine, accumulable


def orthonormal(heads: int, rows: int, dim: int, generator: torch.Generator | None = None) -> Tensor:
    """[heads, rows, dim] float32: random unit rows, uniform on the sphere, mutually orthogonal in blocks of ``dim``."""
    gaussian = torch.randn(heads, -(-rows // dim), dim, dim, generator=generator)
    directions, triangle = torch.linalg.qr(gaussian)
    # QR fixes signs by its own convention; with the signs of R's diagonal the directions are uniform (Haar).
    directions = directions * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return directions.flatten(1, 2)[:, :rows]


def orthogonal_gaussian(heads: int, rows: int, dim: int, generator: torch.Generator | None = None) -> Tensor:
    """[heads, rows, dim]: rows distributed as N(0, I), mutually orthogonal in blocks of ``dim`` (float32)."""
    directions = orthonormal(heads, rows, dim, generator)
    return directions * torch.randn(heads, rows, dim, generator=generator).norm(dim=-1, keepdim=True)


def identity_first(heads: int, rows: int, dim: int, generator: torch.Generator | None = None) -> Tensor:
    """[heads, rows, dim]: the identity, then :func:`orthonormal` rows; those alone where the identity has no room,
    since its first rows would see nothing of the other coordinates (float32)."""
    directions = orthonormal(heads, rows, dim, generator)
    if rows >= dim:
        directions[:, :dim] = torch.eye(dim)
    return directions


def projected(x: Tensor, weight: Tensor, scaling: float, bias: Tensor | None = None) -> Tensor:
    """``weight @ x √scaling + bias``, [B, H, L, M], float32 at least, for vectors ``x`` [B, H, L, d], H a multiple of
    the heads, and a weight [heads, M, d] and bias [heads, M]. Queries and keys take one half of the scaling each."""
    x = accumulable(x)
    weight = weight.to(x.dtype)
    bias = weight.new_zeros(weight.shape[:2]) if bias is None else bias.to(x.dtype)
    return Affine(weight, bias, math.sqrt(scaling))(x)
