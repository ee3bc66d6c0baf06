"""Exponentials of an affine map, apart for queries and keys: the plainest learned features."""

import math
from typing import ClassVar

import torch
from torch import Tensor

from dofla.attention import Affine
from dofla.feature_maps.base import AffineFeatureMap
from dofla.feature_maps.standardized import StandardizedMap

START = 0.5
"""Size of the first log-features, in standard deviations of the inputs: small, so that no feature starts dead."""


class Exponential(StandardizedMap, AffineFeatureMap):
    """``Phi(q) = exp(W q̂ + b)``, ``Phi(k) = exp(V k̂ + c + log_scale)``, with q̂ and k̂ standardized.

    Unlike :class:`PRF` it has no term in |x|², which is what breaks PRF on heads with long vectors, and ties nothing.

    Attributes:
        query, key: W and V, [heads, M, d].
        query_bias, key_bias: b and c, [heads, M].
    """

    learning_rates: ClassVar[dict[str, float]] = StandardizedMap.learning_rates | dict.fromkeys(
        ("query", "key", "query_bias", "key_bias"), 0.02
    )

    def __init__(self, heads: int, head_dim: int, features: int) -> None:
        super().__init__(heads, head_dim, features)
        self.add_sides({"": (features, head_dim), "_bias": (features,)})

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        super().reset_parameters(generator)
        for side in ("query", "key"):
            weight = getattr(self, side)
            weight.copy_(torch.randn(weight.shape, generator=generator) * (START / math.sqrt(self.head_dim)))
            getattr(self, f"{side}_bias").zero_()

    def affine(self, scaling: float, dtype: torch.dtype) -> tuple[Affine, Affine]:
        return self._side("query", dtype), self._side("key", dtype, self.log_scale)

    def _side(self, side: str, dtype: torch.dtype, level: Tensor | None = None) -> Affine:
        """The standardization folded in, as kernels want it."""
        weight = getattr(self, side) / getattr(self, f"{side}_std").unsqueeze(-2)
        bias = getattr(self, f"{side}_bias") - (weight @ getattr(self, f"{side}_mean").unsqueeze(-1)).squeeze(-1)
        return Affine(weight.to(dtype), (bias if level is None else bias + level).to(dtype))
