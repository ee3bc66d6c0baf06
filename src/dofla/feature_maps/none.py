"""No features: a window and sinks alone, the baseline of every hybrid."""

from __future__ import annotations

import torch
from torch import Tensor

from dofla.attention import LOG_ZERO, accumulable
from dofla.feature_maps.base import FeatureMap


class NoFeatures(FeatureMap):
    """``Phi(k) = 0``: nothing is seen but the window and the sinks, one of which a plan must give.

    It has nothing to train. M is 1, a state that stays empty, since every layer has one.
    """

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """There is nothing to draw."""

    def log_query(self, x: Tensor, scaling: float) -> Tensor:
        return accumulable(x).new_zeros(*x.shape[:-1], self.features)

    def log_key(self, x: Tensor, scaling: float) -> Tensor:
        return accumulable(x).new_full((*x.shape[:-1], self.features), LOG_ZERO)
