"""T2R: rectified features of a learned affine map (arXiv 2103.13076, section 2.2)."""

from typing import ClassVar

import torch
from torch import Tensor

from dofla.feature_maps.base import FeatureMap
from dofla.feature_maps.projections import orthogonal_gaussian, projected

FLOOR = 1e-6
"""Added to every feature: a query all of whose features are off would else divide by zero. So small that it weighs
nothing beside a feature that is on; such a query weighs all features of the keys alike."""


class T2R(FeatureMap):
    """``Phi(x) = relu(W x √s + b)``, W and b learned for each head.

    Departures: queries and keys have a W and a b of their own (with the same start), as the paper's have once it has
    merged them with the projections before them; x is scaled; ``FLOOR`` is added.

    Attributes:
        query, key: W of each side, [heads, M, d].
        query_bias, key_bias: b of each side, [heads, M].
    """

    learning_rates: ClassVar[dict[str, float]] = {"query": 0.02, "query_bias": 0.02, "key": 0.02, "key_bias": 0.02}
    query: Tensor
    key: Tensor
    query_bias: Tensor
    key_bias: Tensor

    def __init__(self, heads: int, head_dim: int, features: int) -> None:
        super().__init__(heads, head_dim, features)
        self.add_sides({"": (features, head_dim), "_bias": (features,)})

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        self.query.copy_(orthogonal_gaussian(self.heads, self.features, self.head_dim, generator))
        self.key.copy_(self.query)
        self.query_bias.zero_()
        self.key_bias.zero_()

    def log_features(self, x: Tensor, scaling: float, side: str) -> Tensor:
        rows = projected(x, getattr(self, side), scaling, getattr(self, f"{side}_bias"))
        return torch.log(torch.relu(rows) + FLOOR)
