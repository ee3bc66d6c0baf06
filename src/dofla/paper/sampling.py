"""Positive random features drawn by leverage: Theorem 3 of arXiv 2507.03340 in practice, without training.

The optimal density q_λ(z) = l_λ(z) / N*_λ relative to N(0, I) (`dofla.paper.theory`) cannot be drawn from
directly. Here candidates come from a proposal r, and M of them are chosen with probability proportional to w = l_λ(z)
/ r(z), both relative to N(0, I). A chosen z gets alpha = 1 / q_λ(z) = N*_λ / l_λ(z), so that (1/M) Σ alpha φ(x; z)
φ(y; z) estimates K(x, y). λ is relative to tr Σ throughout, and everything is a logarithm: in real heads s|x|²
exceeds 100.

The proposal, the bias of the estimate and its limits: docs/maths/spending.md, "Features drawn by leverage".
"""

import math

import torch
from torch import Tensor

from dofla.errors import DoflaError, check_choice
from dofla.paper.theory import optimal_log_density, prf_gram, prf_log_features, prf_log_trace

PROPOSALS = ("data", "gaussian")
_BASE_SHARE = 1 / 8
"""Share of N(0, I) in the proposal `data`: it bounds w by 8 l_λ(z) where all the other Gaussians are thin."""


def leverage_features(
    vectors: Tensor,
    scaling: float,
    features: int,
    lam: float,
    *,
    candidates: int = 4096,
    proposal: str = "data",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Directions z from q_λ and their weights 1 / q_λ, for the kernel exp(scaling · x·y) of one head.

    The empirical distribution of the queries and keys in ``vectors`` [J, d] is ρ, and ``lam`` is λ relative to tr Σ. Of
    ``candidates`` from the ``proposal``, one of weight w is taken ⌊Mw/Σw⌋ or ⌈Mw/Σw⌉ times for M ``features``, so some
    z may repeat. Their order is random: the first of them are a smaller draw. Returns z [M, d] and log alpha [M], both
    float64 on the CPU; DoflaError for a number out of range, or vectors that are no finite matrix.
    """
    if features < 1:
        raise DoflaError(f"features is {features}: draw 1 or more")
    if candidates < features:
        raise DoflaError(f"candidates is {candidates}, below the {features} features to draw: give several times more")
    check_choice("proposal", proposal, PROPOSALS)
    vectors = vectors.detach().to("cpu", torch.float64)
    log_scale = prf_log_trace(vectors, scaling)
    gram = prf_gram(vectors, scaling, log_scale)
    if proposal == "data":
        shares = ridge_leverage(gram, lam)
        z, log_proposal = _draw_mixture(vectors, scaling, shares / shares.sum(), candidates, generator)
    else:
        z = torch.randn(candidates, vectors.shape[1], generator=generator, dtype=torch.float64)
        log_proposal = torch.zeros(candidates, dtype=torch.float64)
    log_density = optimal_log_density(prf_log_features(vectors, z, scaling, log_scale), gram, lam)
    chosen = _choose((log_density - log_proposal).softmax(0), features, generator)
    return z[chosen], -log_density[chosen]


def ridge_leverage(gram: Tensor, lam: float) -> Tensor:
    """h_j = [Σ(Σ + λI)⁻¹]_jj with Σ = gram / J: the share [J] of each vector in the degrees of freedom, float64;
    DoflaError unless λ, in the unit of the kernel, is positive."""
    if not 0 < lam < math.inf:
        raise DoflaError(f"lam={lam} is not a positive number: pass lam > 0")
    operator = gram.double() / len(gram)
    ridge = operator + lam * torch.eye(len(gram), dtype=torch.float64)
    return torch.linalg.solve(ridge, operator).diagonal().clamp(min=0.0)


def _draw_mixture(
    vectors: Tensor, scaling: float, shares: Tensor, count: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """``count`` draws from the proposal `data`: z [count, d], and its log-density [count] relative to N(0, I)."""
    z = torch.randn(count, vectors.shape[1], generator=generator, dtype=torch.float64)
    source = torch.multinomial(shares, count, replacement=True, generator=generator)
    from_data = torch.rand(count, generator=generator, dtype=torch.float64) >= _BASE_SHARE
    z = z + from_data[:, None] * (2 * math.sqrt(scaling)) * vectors[source]
    # N(2√s·x, I) relative to N(0, I) is φ(x; z)² / K(x, x).
    log_ratio = 2 * prf_log_features(vectors, z, scaling) - scaling * vectors.square().sum(1, keepdim=True)
    log_data = (shares.log()[:, None] + log_ratio).logsumexp(0) + math.log(1 - _BASE_SHARE)
    return z, torch.logaddexp(log_data, torch.full_like(log_data, math.log(_BASE_SHARE)))


def _choose(probability: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """``count`` indices, i expected count · probability[i] times (systematic resampling), in random order."""
    offset = torch.rand(1, generator=generator, dtype=torch.float64)
    points = (offset + torch.arange(count, dtype=torch.float64)) / count
    chosen = torch.searchsorted(probability.cumsum(0), points).clamp(max=len(probability) - 1)
    return chosen[torch.randperm(count, generator=generator)]
