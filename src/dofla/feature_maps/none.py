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

    def log_features(self, x: Tensor, scaling: float, side: str) -> Tensor:
        return accumulable(x).new_full((*x.shape[:-1], self.features), 0.0 if side == "query" else LOG_ZERO)
