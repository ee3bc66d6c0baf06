"""Ways to weigh the far past that dofla does not have, for trials: written out pair by pair, without a state.

Each could be carried as a state of the bytes it is said to have, so what it gains or loses against the default here
is what it would gain or lose there.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from dofla.attention import exact_scores, log_kernel, rounded
from dofla.feature_maps.layer import LinearAttention


class FarPast(LinearAttention):
    """A layer whose KV heads have one size, and which says itself what a far key weighs.

    Attributes:
        learning_rates: of the parameters that it has beside those of its map.
    """

    learning_rates: ClassVar[dict[str, float]] = {}

    def log_scores(
        self, query: Tensor, key: Tensor, rows: Tensor, *, scaling: float, weight: Tensor | None, causal: bool
    ) -> Tensor:
        if self.keeps_eight_bits:
            key = rounded(key)
        share = query.shape[1] // key.shape[1]
        near = self.seen_exactly(rows, key.shape[-2], share=share, weight=weight, causal=causal)
        return torch.where(near, exact_scores(query, key, scaling), self.far_scores(query, key, rows, scaling))

    def far_scores(self, query: Tensor, key: Tensor, rows: Tensor, scaling: float) -> Tensor:
        """Log of the weight [B, H, R, L] of each key [B, Hkv, L, d] for queries [B, H, R, d] at ``rows`` [R]."""
        return log_kernel(self.maps[0].log_query(query, scaling), self.maps[0].log_key(key, scaling))


class Cosine(FarPast):
    """Any map, its kernel times ``cos(π/2 · (i − j) / L)`` (cosFormer, arXiv 2202.08791).

    A cosine of a difference is two products, so the state has twice the features of the map.
    """

    def far_scores(self, query: Tensor, key: Tensor, rows: Tensor, scaling: float) -> Tensor:
        length = key.shape[-2]
        distance = (rows[:, None] - torch.arange(length)).clamp_min(0)
        return super().far_scores(query, key, rows, scaling) + (distance * (math.pi / 2 / length)).cos().log()


class Taylor(FarPast):
    """``weight(k) · (1 + s + s²/2)`` with ``s = (A q̂ + a)·(B k̂ + b)`` of r dimensions: the exponential to second
    order (Based, arXiv 2402.18668), of standardised inputs and with a level for each key.

    The kernel is positive though its 1 + r + r (r + 1) / 2 features are not. The map is ``exponential`` with r + 1
    features, whose logarithms are the affine maps wanted here; the last of the key's is the log of its weight.
    """

    @staticmethod
    def dimensions(features: int) -> int:
        """The largest r that ``features`` features allow."""
        return int((math.sqrt(8 * features + 1) - 3) / 2)

    def far_scores(self, query: Tensor, key: Tensor, rows: Tensor, scaling: float) -> Tensor:
        affine = self.maps[0]
        level = affine.log_scale.unsqueeze(-1)
        a, b = affine.log_query(query, scaling)[..., :-1], affine.log_key(key, scaling) - level
        s = exact_scores(a, b[..., :-1], 1.0)
        weight = (b[..., -1] + level.squeeze(-1)).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        return torch.log((1 + (1 + s).square()) / 2) + weight.unsqueeze(-2)


DECAY = 1e-3
"""With which decays start: after 1,000 tokens a key weighs e times less."""


class Decay(FarPast):
    """Feature m of a key that is n tokens old weighs ``exp(-λ_m n)`` as much, λ learned for each head and feature."""

    learning_rates: ClassVar[dict[str, float]] = {"log_decay": 0.05}

    def __init__(self, feature_map: str, features: list[int], *rest) -> None:
        super().__init__(feature_map, features, *rest)
        self.log_decay = nn.Parameter(torch.full((len(features), features[0]), math.log(DECAY)))

    def far_scores(self, query: Tensor, key: Tensor, rows: Tensor, scaling: float) -> Tensor:
        passed = self.passed(key)
        a, b = self.maps[0].log_query(query, scaling), self.maps[0].log_key(key, scaling)
        at_rows = passed[:, :, rows].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        return log_kernel(a - at_rows, b + passed)

    def passed(self, key: Tensor) -> Tensor:
        """How much each feature has decayed since the beginning, in nats [B, Hkv, L, M]."""
        positions = torch.arange(key.shape[-2], dtype=torch.float32)
        return (self.log_decay.exp().unsqueeze(-2) * positions[:, None])[None]


class Gate(Decay):
    """A decay that depends on what comes in (gated linear attention, arXiv 2312.06635): when a key enters the state,
    feature m of all earlier ones decays by ``exp(u_m · k̂ + c_m)`` nats."""

    learning_rates: ClassVar[dict[str, float]] = {"log_decay": 0.05, "gate": 0.02}

    def __init__(self, feature_map: str, features: list[int], head_dim: int, *rest) -> None:
        super().__init__(feature_map, features, head_dim, *rest)
        self.gate = nn.Parameter(torch.zeros(len(features), features[0], head_dim))

    def far_scores(self, query: Tensor, key: Tensor, rows: Tensor, scaling: float) -> Tensor:
        # A key enters when it leaves the window.
        return super().far_scores(query, key, (rows - self.exact_tokens[0][0]).clamp_min(0), scaling)

    def passed(self, key: Tensor) -> Tensor:
        gates = self.maps[0].standardised(key.float(), "key") @ self.gate.mT + self.log_decay.unsqueeze(-2)
        return gates.clamp_max(2).exp().cumsum(-2)
