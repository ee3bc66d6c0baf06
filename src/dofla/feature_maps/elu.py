"""elu(x) + 1, the feature map of the linear transformer (arXiv 2006.16236, equation 7)."""

from __future__ import annotations

import torch
from torch import Tensor

from dofla.feature_maps.base import FeatureMap
from dofla.feature_maps.projections import identity_first, projected


class Elu1(FeatureMap):
    """``Phi_m(x) = elu(z_m·x √s) + 1``, nothing trained; z is the identity where M is the head size, as in the paper.

    Departures: other numbers of features see x through random orthonormal rows (the identity first, if there is room
    for it), drawn once; x is scaled.

    Attributes:
        z: [heads, M, d]; a buffer, saved with the model.
    """

    z: Tensor

    def __init__(self, heads: int, head_dim: int, features: int) -> None:
        super().__init__(heads, head_dim, features)
        self.register_buffer("z", torch.empty(heads, features, head_dim, dtype=torch.float32))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        self.z.copy_(identity_first(self.heads, self.features, self.head_dim, generator))

    def log_query(self, x: Tensor, scaling: float) -> Tensor:
        return self._log_features(x, scaling)

    def log_key(self, x: Tensor, scaling: float) -> Tensor:
        return self._log_features(x, scaling)

    def _log_features(self, x: Tensor, scaling: float) -> Tensor:
        rows = projected(x, self.z, scaling)
        # Below 0 the feature is an exponential, whose logarithm is the exponent itself, however far down.
        return torch.where(rows < 0, rows, torch.log1p(rows.clamp(min=0)))
