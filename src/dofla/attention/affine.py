"""Log-features that are an affine map of the vector, less a multiple of its squared length."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Affine:
    """``scale · weight @ x + bias - curvature · |x|²`` per KV head; kernels need not store the result."""

    weight: Tensor  # [Hkv, M, d]
    bias: Tensor  # [Hkv, M]
    scale: float = 1.0  # apart from the weight, so that nobody has to multiply all of it for one token
    curvature: float = 0.0  # 0 for maps without such a term

    def __call__(self, x: Tensor) -> Tensor:
        """Log-features [B, H, L, M] of vectors ``x`` [B, H, L, d], H a multiple of Hkv."""
        batch, heads, length, head_dim = x.shape
        x = x.reshape(batch, len(self.weight), -1, head_dim)
        # The product is ours alone and large, so what is added to it is added in place.
        log_features = (x * self.scale @ self.weight.mT).add_(self.bias.unsqueeze(-2))
        if self.curvature:
            log_features.sub_(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() * self.curvature)
        return log_features.view(batch, heads, length, -1)
