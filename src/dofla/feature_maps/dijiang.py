"""DiJiang (arXiv 2403.19928): weighted quasi-Monte Carlo features, as in the paper and as in the public code."""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from dofla.attention import Affine
from dofla.feature_maps.base import AffineFeatureMap, DrawnFeatureMap
from dofla.feature_maps.prf import positive_features
from dofla.feature_maps.projections import projected


class DiJiang(DrawnFeatureMap, AffineFeatureMap):
    """``Phi_m(x) = sqrt(alpha_m / M) · exp(z_m·x √s − s|x|²/2)``, z_m the normal quantiles of quasi-random points.

    The paper's weighted positive fixed features (theorem 3.3): z fixed, the weights alone trained.
    Departures: the paper prints ``exp(−|x|²)`` and ``z_m = Φ⁻¹(t_m) v_m``, one quantile along a direction of the
    sphere, whose lengths are not those of N(0, I); here every coordinate is a quantile, ``z_m = Φ⁻¹(u_m)`` with u a
    scrambled Sobol sequence in the unit cube, and the square is halved, so that with alpha = 1, as initialized,
    ``E[Phi(x)·Phi(y)]`` is the kernel ``exp(s x·y)``. Queries and keys share z and alpha.

    Attributes:
        z: [heads, M, d], scrambled for each head anew; a buffer, saved with the model.
        log_alpha: [heads, M].
    """

    learning_rates: ClassVar[dict[str, float]] = {"log_alpha": 0.02}

    def __init__(self, heads: int, head_dim: int, features: int) -> None:
        super().__init__(heads, head_dim, features)
        self.log_alpha = nn.Parameter(torch.empty(heads, features, dtype=torch.float32))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        self.log_alpha.zero_()
        self.z.copy_(sobol_gaussian(self.heads, self.features, self.head_dim, generator))

    def affine(self, scaling: float, dtype: torch.dtype) -> tuple[Affine, Affine]:
        return positive_features(self.z.to(dtype), self.log_alpha.to(dtype), scaling)


class DiJiangCode(DrawnFeatureMap):
    """``Phi(x) = softmax_m(t_m · c_m·x √s)``, c_m the columns of the orthonormal DCT matrix, t_m = Φ⁻¹(u_m).

    The reading of DiJiang's public code (``modeling_gpt_neox.py``, ``proj_matrix``), which has one feature per
    coordinate, u pseudo-random (so t is standard normal) and nothing of the map trained. Here other numbers of
    features go through the columns again with further t, up to M. Departures: the code leaves x unscaled, and shares t
    among the heads of a layer; its decay, gate and group norm are no part of a feature map; and it does not divide by
    the sum of the weights, as attention here always does.

    Attributes:
        z: [heads, M, d], the rows ``t_m c_m``.
    """

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        t = torch.randn(self.heads, self.features, 1, generator=generator)
        columns = dct_matrix(self.head_dim).float().mT
        self.z.copy_(t * columns[torch.arange(self.features) % self.head_dim])

    def log_features(self, x: Tensor, scaling: float, side: str) -> Tensor:
        return torch.log_softmax(projected(x, self.z, scaling), dim=-1)


def sobol_gaussian(heads: int, rows: int, dim: int, generator: torch.Generator | None = None) -> Tensor:
    """[heads, rows, dim]: for each head the normal quantiles of the first points of a scrambled Sobol sequence."""
    seeds = torch.randint(2**31, (heads,), generator=generator).tolist()
    points = [torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed) for seed in seeds]
    u = torch.stack([engine.draw(rows, dtype=torch.float64) for engine in points])
    # Coordinates are multiples of the engine's step, 0 among them, of which there is no quantile: take the middle.
    return torch.special.ndtri(u + 2.0 ** -(torch.quasirandom.SobolEngine.MAXBIT + 1)).float()


def dct_matrix(dim: int) -> Tensor:
    """The orthonormal DCT-II matrix [dim, dim], frequencies along the rows (float64)."""
    n = torch.arange(dim, dtype=torch.float64)
    matrix = torch.cos(math.pi / dim * n[:, None] * (n + 0.5)) * math.sqrt(2 / dim)
    matrix[0] = math.sqrt(1 / dim)
    return matrix
