"""Performer: positive random features that nobody trains (arXiv 2009.14794, lemma 1 and section 2.4)."""

import torch

from dofla.attention import Affine
from dofla.feature_maps.base import AffineFeatureMap, DrawnFeatureMap
from dofla.feature_maps.prf import positive_features
from dofla.feature_maps.projections import orthogonal_gaussian


class Performer(DrawnFeatureMap, AffineFeatureMap):
    """``Phi_m(x) = exp(z_m·x √s − s|x|²/2) / √M``, z ~ N(0, I) with rows orthogonal in blocks of the head size.

    An estimate of the kernel ``exp(s x·y)`` without bias, of less variance than with independent rows. Queries and
    keys share z. Departures from the paper's code: every head has rows of its own, and no constant is added to the
    features, as logarithms need none.
    """

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        self.z.copy_(orthogonal_gaussian(self.heads, self.features, self.head_dim, generator))

    def affine(self, scaling: float, dtype: torch.dtype) -> tuple[Affine, Affine]:
        z = self.z.to(dtype)
        return positive_features(z, z.new_zeros(z.shape[:2]), scaling)
