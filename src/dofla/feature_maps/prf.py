"""Positive random features, learned (arXiv 2507.03340, sections 2 and 4; Performer, arXiv 2009.14794, lemma 1)."""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from dofla.attention import Affine
from dofla.feature_maps.base import AffineFeatureMap
from dofla.feature_maps.projections import orthogonal_gaussian


class PRF(AffineFeatureMap):
    """``Phi_m(x) = sqrt(alpha_m / M) · exp(z_m·x √s − s|x|²/2)`` for the kernel ``exp(s x·y)``, s the scaling.

    Queries and keys share z and alpha. With z ~ N(0, I) and alpha = 1, as initialized, ``E[Phi(x)·Phi(y)]`` is the
    kernel exactly: an untrained PRF is Performer with orthogonal features. Training z and alpha is the paper's method.
    """

    learning_rates: ClassVar[dict[str, float]] = {"z": 0.02, "log_alpha": 0.2}

    def __init__(self, heads: int, head_dim: int, features: int) -> None:
        super().__init__(heads, head_dim, features)
        self.z = nn.Parameter(torch.empty(heads, features, head_dim, dtype=torch.float32))
        self.log_alpha = nn.Parameter(torch.empty(heads, features, dtype=torch.float32))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        self.log_alpha.zero_()
        self.z.copy_(orthogonal_gaussian(self.heads, self.features, self.head_dim, generator))

    def affine(self, scaling: float, dtype: torch.dtype) -> tuple[Affine, Affine]:
        return positive_features(self.z.to(dtype), self.log_alpha.to(dtype), scaling)


def positive_features(z: Tensor, log_alpha: Tensor, scaling: float) -> tuple[Affine, Affine]:
    """The log-features of :class:`PRF`, of queries and of keys: ``z`` [heads, M, d], ``log_alpha`` [heads, M]."""
    bias = (log_alpha - math.log(log_alpha.shape[-1])) / 2
    shared = Affine(z, bias, math.sqrt(scaling), scaling / 2)
    return shared, shared
