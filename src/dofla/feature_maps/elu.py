"""elu(x) + 1, the feature map of the linear transformer (arXiv 2006.16236, equation 7)."""

import torch
from torch import Tensor

from dofla.feature_maps.base import DrawnFeatureMap
from dofla.feature_maps.projections import identity_first, projected


class Elu1(DrawnFeatureMap):
    """``Phi_m(x) = elu(z_m·x √s) + 1``, nothing trained; z is the identity where M is the head size, as in the paper.

    Departures: other numbers of features see x through random orthonormal rows (the identity first, if there is room
    for it), drawn once; x is scaled.
    """

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        self.z.copy_(identity_first(self.heads, self.features, self.head_dim, generator))

    def log_features(self, x: Tensor, scaling: float, side: str) -> Tensor:
        rows = projected(x, self.z, scaling)
        # Below 0 the feature is an exponential, whose logarithm is the exponent itself, however far down.
        return torch.where(rows < 0, rows, torch.log1p(rows.clamp(min=0)))
