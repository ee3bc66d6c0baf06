"""No features: tokens alone, the baseline of every hybrid."""

import torch
from torch import Tensor

from dofla.attention import LOG_ZERO, accumulable
from dofla.feature_maps.base import FeatureMap


class NoFeatures(FeatureMap):
    """``Phi(k) = 0``: nothing is seen but the window, the sinks and the tiers, one of which a plan must give.

    It has nothing to train. M may be 0, which costs nothing; of more, the state stays empty.
    """

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """There is nothing to draw."""

    def log_query(self, x: Tensor, scaling: float) -> Tensor:
        return accumulable(x).new_zeros(*x.shape[:-1], self.features)

    def log_key(self, x: Tensor, scaling: float) -> Tensor:
        return accumulable(x).new_full((*x.shape[:-1], self.features), LOG_ZERO)
