"""Hedgehog: softmax features of a learned projection (arXiv 2402.04347, section 4)."""

from typing import ClassVar

import torch
from torch import Tensor

from dofla.feature_maps.base import FeatureMap
from dofla.feature_maps.projections import identity_first, projected


class Hedgehog(FeatureMap):
    """``Phi(x) = [softmax(W x √s), softmax(−W x √s)]``, W separate for queries and keys and for each head.

    The paper's spiky features, both signs, each sign normalized over its features. W starts with the identity; below
    2 d features it has no room for that, and starts with random orthonormal rows. Departures: an odd M leaves the
    last row of W without its negative; where a sign has one feature (M ≤ 2 for both) its softmax is 1, and the map
    then weighs all keys alike; x is scaled; there is no bias.

    Attributes:
        query, key: W of each side, [heads, ⌈M/2⌉, d].
    """

    learning_rates: ClassVar[dict[str, float]] = {"query": 0.02, "key": 0.02}
    query: Tensor
    key: Tensor

    def __init__(self, heads: int, head_dim: int, features: int) -> None:
        super().__init__(heads, head_dim, features)
        self.add_sides({"": ((features + 1) // 2, head_dim)})

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        self.query.copy_(identity_first(self.heads, (self.features + 1) // 2, self.head_dim, generator))
        # The same start: a query is then most like the keys that point its way.
        self.key.copy_(self.query)

    def log_features(self, x: Tensor, scaling: float, side: str) -> Tensor:
        rows = projected(x, getattr(self, side), scaling)
        negative = -rows[..., : self.features // 2]
        return torch.cat([torch.log_softmax(rows, dim=-1), torch.log_softmax(negative, dim=-1)], dim=-1)
