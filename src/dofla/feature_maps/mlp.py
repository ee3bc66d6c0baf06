"""Exponentials of a small perceptron beside an affine map: the default of hybrid layers."""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dofla.attention import accumulable
from dofla.feature_maps.exponential import START
from dofla.feature_maps.standardized import StandardizedMap

HIDDEN = 32
"""Hidden units: weights, not state. Twice and four times as many were no better (``docs/research/features.md``)."""


class MLP(StandardizedMap):
    """``Phi(x) = exp(W x̂ + W₂ silu(W₁ x̂ + b₁) + b)``, x̂ standardized, apart for queries and keys and for each head.

    The features of keys are multiplied by ``exp(log_scale)``. W₂ starts small, so that the map starts as
    :class:`~dofla.feature_maps.exponential.Exponential`.

    Attributes:
        query, key: W of each side, [heads, M, d].
        query_bias, key_bias: b, [heads, M].
        query_in, key_in: W₁, [heads, 32, d].
        query_in_bias, key_in_bias: b₁, [heads, 32].
        query_out, key_out: W₂, [heads, M, 32].
    """

    learning_rates: ClassVar[dict[str, float]] = StandardizedMap.learning_rates | {
        f"{side}{part}": 0.02 for side in ("query", "key") for part in ("", "_bias", "_in", "_in_bias", "_out")
    }

    def __init__(self, heads: int, head_dim: int, features: int) -> None:
        super().__init__(heads, head_dim, features)
        affine = {"": (features, head_dim), "_bias": (features,)}
        self.add_sides(affine | {"_in": (HIDDEN, head_dim), "_in_bias": (HIDDEN,), "_out": (features, HIDDEN)})

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        super().reset_parameters(generator)
        starts = {"": START / math.sqrt(self.head_dim), "_in": 1 / math.sqrt(self.head_dim)}
        starts["_out"] = 0.1 / math.sqrt(HIDDEN)
        for side in ("query", "key"):
            for part, size in starts.items():
                weight = getattr(self, side + part)
                weight.copy_(torch.randn(weight.shape, generator=generator) * size)
            getattr(self, f"{side}_bias").zero_()
            getattr(self, f"{side}_in_bias").zero_()

    def log_features(self, x: Tensor, scaling: float, side: str) -> Tensor:
        batch, heads, length, _ = x.shape
        z = self.standardized(accumulable(x), side)
        weight, bias, inner, inner_bias, outer = (
            getattr(self, side + part).to(z.dtype) for part in ("", "_bias", "_in", "_in_bias", "_out")
        )
        hidden = F.silu(z @ inner.mT + inner_bias.unsqueeze(-2))
        log_features = z @ weight.mT + hidden @ outer.mT + bias.unsqueeze(-2)
        if side == "key":
            log_features = log_features + self.log_scale.to(z.dtype).unsqueeze(-1)
        return log_features.view(batch, heads, length, -1)
