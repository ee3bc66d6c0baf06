"""Leverage-sampled features against the definitions, in float64."""

import math

import pytest
import torch

from dofla.paper import theory
from dofla.paper.sampling import PROPOSALS, _choose, _draw_mixture, leverage_features, ridge_leverage

SCALING, LAM = 0.5, 2**-6


def vectors(count: int, width: int, size: float = 1.0, seed: int = 0) -> torch.Tensor:
    return size * torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw(x, features, seed=0, scaling=SCALING, **options):
    return leverage_features(x, scaling, features, LAM, generator=torch.Generator().manual_seed(seed), **options)


def estimate(x, z, log_alpha, log_scale, scaling=SCALING):
    """K̂ [J, J] on the scale of the trace, sum by sum."""
    total = torch.zeros(len(x), len(x), dtype=torch.float64)
    for direction, weight in zip(z, log_alpha, strict=True):
        feature = math.sqrt(scaling) * x @ direction - scaling / 2 * x.square().sum(1) + (weight - log_scale) / 2
        total += feature.exp()[:, None] * feature.exp()
    return total / len(z)


def relative_error(x, drawn, scaling=SCALING):
    log_scale = theory.prf_log_trace(x, scaling)
    gram = theory.prf_gram(x, scaling, log_scale)
    return (torch.linalg.norm(estimate(x, *drawn, log_scale, scaling) - gram) / torch.linalg.norm(gram)).item()


@pytest.mark.parametrize("proposal", PROPOSALS)
def test_weights_are_one_over_the_optimal_density(proposal):
    x = vectors(7, 3)
    z, log_alpha = draw(x, 20, proposal=proposal, candidates=200)
    sigma = torch.exp(SCALING * x @ x.T) / 7
    lam = LAM * sigma.trace()
    inverse = torch.linalg.inv(sigma + lam * torch.eye(7).double())
    dof = (sigma @ inverse).trace()
    features = torch.exp(math.sqrt(SCALING) * x @ z.T - SCALING / 2 * x.square().sum(1, keepdim=True))
    leverage = torch.einsum("iz,ij,jz->z", features, inverse, features) / 7
    torch.testing.assert_close(log_alpha, (dof / leverage).log(), rtol=0, atol=1e-8)
    assert z.dtype == log_alpha.dtype == torch.float64


@pytest.mark.parametrize("proposal", PROPOSALS)
def test_the_estimate_is_unbiased_up_to_the_candidates(proposal):
    x = vectors(5, 2)
    log_scale = theory.prf_log_trace(x, SCALING)
    draws = torch.stack([estimate(x, *draw(x, 8, seed, proposal=proposal), log_scale) for seed in range(150)])
    z_scores = (draws.mean(0) - theory.prf_gram(x, SCALING, log_scale)) / (draws.std(0) / math.sqrt(150))
    assert z_scores.abs().max() < 4


def test_the_bias_is_the_candidates_error_in_the_degrees_of_freedom():
    """With few candidates: the mean over all choices, enumerated, times Ñ / N* is importance sampling's estimate."""
    x = vectors(5, 2)
    log_scale = theory.prf_log_trace(x, SCALING)
    gram = theory.prf_gram(x, SCALING, log_scale)
    z, log_proposal = _draw_mixture(x, SCALING, torch.full((5,), 0.2).double(), 6, torch.Generator().manual_seed(0))
    log_density = theory.optimal_log_density(theory.prf_log_features(x, z, SCALING, log_scale), gram, LAM)
    ratio = (log_density - log_proposal).exp()  # w / N*
    single = torch.stack([estimate(x, z[c : c + 1], -log_density[c : c + 1], log_scale) for c in range(6)])
    mean = torch.einsum("c,cij->ij", ratio / ratio.sum(), single)
    torch.testing.assert_close(mean * ratio.mean(), estimate(x, z, -log_proposal, log_scale))


def test_the_proposal_knows_its_own_density():
    x, shares = vectors(4, 2), torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    z, log_density = _draw_mixture(x, SCALING, shares, 4000, torch.Generator().manual_seed(1))
    normal = torch.distributions.MultivariateNormal(torch.zeros(2).double(), torch.eye(2).double())
    parts = [
        share * normal.log_prob(z - 2 * math.sqrt(SCALING) * row).exp() for share, row in zip(shares, x, strict=True)
    ]
    density = 7 / 8 * sum(parts) + 1 / 8 * normal.log_prob(z).exp()
    torch.testing.assert_close(log_density, density.log() - normal.log_prob(z))
    # The draws follow it: importance weights of N(0, I) average to one.
    weights = (-log_density).exp()
    assert abs(weights.mean() - 1) < 4 * weights.std() / math.sqrt(4000)


def test_ridge_leverage_is_the_diagonal_and_adds_up_to_the_degrees_of_freedom():
    x = vectors(6, 2)
    gram = theory.prf_gram(x, SCALING)
    expected = (gram / 6 @ torch.linalg.inv(gram / 6 + LAM * torch.eye(6).double())).diagonal()
    torch.testing.assert_close(ridge_leverage(gram, LAM), expected)
    assert ridge_leverage(gram, LAM).sum().item() == pytest.approx(theory.degrees_of_freedom(gram, LAM))


def test_a_choice_takes_each_candidate_as_often_as_its_weight_says():
    probability = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]).double()
    counts = torch.stack(
        [torch.bincount(_choose(probability, 7, torch.Generator().manual_seed(n)), minlength=5) for n in range(400)]
    ).double()
    assert ((counts - 7 * probability).abs() < 1).all()
    assert (counts.mean(0) - 7 * probability).abs().max() < 4 * 0.5 / math.sqrt(400)
    assert (counts[:, -1] == 0).all()


def test_long_vectors_survive_in_log_space():
    x = vectors(32, 16)
    x *= (torch.linspace(5, 300, 32).double() / x.square().sum(1)).sqrt()[:, None]  # s|x|² up to 150
    for proposal in PROPOSALS:
        z, log_alpha = draw(x, 128, proposal=proposal)
        assert z.isfinite().all()
        assert log_alpha.isfinite().all()
    assert relative_error(x, draw(x, 128)) < 0.3
    assert relative_error(x, (torch.randn(128, 16).double(), torch.zeros(128).double())) == pytest.approx(1.0, abs=1e-6)


def test_the_generator_decides_and_the_unit_of_lambda_is_the_trace():
    x = vectors(10, 3)
    first, again, other = draw(x, 16, 3), draw(x, 16, 3), draw(x, 16, 4)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    # Half precision is taken as it is: nothing is computed in it.
    half = draw(x.bfloat16(), 16, 3)
    assert torch.equal(half[0], draw(x.bfloat16().double(), 16, 3)[0])
