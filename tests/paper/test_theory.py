"""Theory against brute force: with a handful of z, every expectation, supremum and probability can be enumerated."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.errors import DoflaError
from dofla.paper import theory
from dofla.profiles.spectrum import degrees_of_freedom as profile_dof
from dofla.profiles.spectrum import gram_spectrum

seeds = st.integers(0, 2**31 - 1)
lams = st.floats(-4.0, 1.0).map(lambda exponent: 10.0**exponent)
quick = settings(max_examples=25, derandomize=True)


class Finite:
    """A kernel that is exactly a sum over `atoms` features: φ [J, Z] > 0, base probabilities [Z], gram [J, J]."""

    def __init__(self, seed: int, points: int = 5, atoms: int = 7):
        generator = torch.Generator().manual_seed(seed)
        self.log_features = torch.randn(points, atoms, generator=generator, dtype=torch.float64)
        self.features = self.log_features.exp()
        self.base = torch.rand(atoms, generator=generator, dtype=torch.float64) + 0.05
        self.base /= self.base.sum()
        self.gram = self.features * self.base @ self.features.T
        self.generator = generator

    @property
    def sigma(self) -> torch.Tensor:
        return self.gram / len(self.gram)

    def random_log_density(self) -> torch.Tensor:
        """Relative to the base: E_z[q] = 1."""
        weights = torch.rand(len(self.base), generator=self.generator, dtype=torch.float64) + 1e-3
        return (weights / (weights * self.base).sum()).log()

    def estimate(self, counts: torch.Tensor, log_density: torch.Tensor) -> torch.Tensor:
        """K̂ [..., J, J] when atom z was drawn counts[..., z] times."""
        weights = counts.double() / counts.sum(-1, keepdim=True) / log_density.exp()
        return torch.einsum("iz,...z,jz->...ij", self.features, weights, self.features)

    def deviation(self, estimate: torch.Tensor, lam: float) -> torch.Tensor:
        """‖(Σ+λI)^-½ (Σ̂−Σ) (Σ+λI)^-½‖_op for each estimate."""
        values, vectors = torch.linalg.eigh(self.sigma)
        root = vectors * (values + lam).rsqrt() @ vectors.T
        difference = (estimate - self.gram) / len(self.gram)
        return torch.linalg.matrix_norm(root @ difference @ root, ord=2)


@quick
@given(seeds, lams)
def test_degrees_of_freedom_are_those_of_the_covariance_of_the_features(seed, lam):
    """Under ρ, on L²(base): the spectrum of the operator Σ, seen from the other side."""
    kernel = Finite(seed, points=4)
    covariance = kernel.features.T @ kernel.features / 4 * (kernel.base[:, None] * kernel.base).sqrt()
    expected = torch.trace(covariance @ torch.linalg.inv(covariance + lam * torch.eye(7, dtype=torch.float64))).item()
    assert theory.degrees_of_freedom(kernel.gram, lam) == pytest.approx(expected, rel=1e-9)


@quick
@given(seeds, lams)
def test_leverage_equals_its_definition_and_averages_to_the_degrees_of_freedom(seed, lam):
    kernel = Finite(seed, points=4)
    scores = theory.log_leverage(kernel.log_features, kernel.gram, lam).exp()
    for z in range(7):
        feature = kernel.features[:, z]
        solution = torch.linalg.solve(kernel.sigma + lam * torch.eye(4, dtype=torch.float64), feature)
        definition = sum(feature[j] * solution[j] for j in range(4)) / 4
        assert scores[z].item() == pytest.approx(definition.item(), rel=1e-8)
    dof = theory.degrees_of_freedom(kernel.gram, lam)
    assert (kernel.base * scores).sum().item() == pytest.approx(dof, rel=1e-10)


@quick
@given(seeds, lams)
def test_optimal_density_is_normalized_and_no_density_has_a_smaller_supremum(seed, lam):
    kernel = Finite(seed)
    arguments = kernel.log_features, kernel.gram, lam
    optimal = theory.optimal_log_density(*arguments)
    dof = theory.degrees_of_freedom(kernel.gram, lam)
    assert (kernel.base * optimal.exp()).sum().item() == pytest.approx(1.0, rel=1e-10)
    assert theory.max_leverage(*arguments, optimal) == pytest.approx(dof, rel=1e-10)
    for _ in range(50):
        density = kernel.random_log_density()
        found = theory.max_leverage(*arguments, density)
        ratios = [math.exp(a - b) for a, b in zip(theory.log_leverage(*arguments), density, strict=True)]
        assert found == pytest.approx(max(ratios), rel=1e-12)
        assert found >= dof * (1 - 1e-12)


@quick
@given(seeds, lams, st.floats(-600.0, 600.0))
def test_the_unit_of_the_kernel_does_not_matter(seed, lam, log_unit):
    kernel = Finite(seed)
    unit = math.exp(log_unit)
    scores = theory.log_leverage(kernel.log_features, kernel.gram, lam)
    scaled = theory.log_leverage(kernel.log_features + log_unit / 2, kernel.gram * unit, lam * unit)
    assert torch.allclose(scores, scaled, rtol=0, atol=1e-7)


def test_a_feature_that_is_zero_scores_zero_and_need_not_be_drawn():
    kernel = Finite(0)
    log_features = torch.cat([kernel.log_features, torch.full((5, 1), -math.inf)], dim=1)
    assert theory.log_leverage(log_features, kernel.gram, 0.1)[-1] == -math.inf
    density = theory.optimal_log_density(log_features, kernel.gram, 0.1)
    dof = theory.degrees_of_freedom(kernel.gram, 0.1)
    assert theory.max_leverage(log_features, kernel.gram, 0.1, density) == pytest.approx(dof)
    density[0] = -math.inf
    assert theory.max_leverage(log_features, kernel.gram, 0.1, density) == math.inf


@quick
@given(st.floats(0.01, 500.0), st.floats(0.01, 3.0), st.floats(0.001, 0.999))
def test_required_features_is_the_smallest_integer(leverage, t, delta):
    count = theory.required_features(leverage, t, delta)
    bound = 4 * leverage / t * math.log(64 * leverage / (delta * t))
    assert count >= max(bound, 1)
    assert count == 1 or count - 1 < bound


def compositions(total: int) -> torch.Tensor:
    """All [C, 3] counts of three atoms that add up to total."""
    grid = torch.cartesian_prod(torch.arange(total + 1), torch.arange(total + 1))
    grid = grid[grid.sum(1) <= total]
    return torch.cat([grid, total - grid.sum(1, keepdim=True)], dim=1)


def probability(counts: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    """Multinomial probability of each row of counts."""
    counts = counts.double()
    total = torch.lgamma(counts[0].sum() + 1)
    return (total - torch.lgamma(counts + 1).sum(1) + counts @ chances.log()).exp()


def errors(kernel: Finite, estimate: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared errors of the kernel in L²(ρ⊗ρ) and of its integral against values [J, C] in L²(ρ)."""
    difference = estimate - kernel.gram
    count = len(kernel.gram)
    integral = (difference @ values / count).square().sum((-2, -1)) / count
    return difference.square().mean((-2, -1)), integral


@pytest.mark.parametrize("t", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("optimal", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_theorem_3_with_every_outcome_enumerated(seed, optimal, t):
    kernel, lam, delta = Finite(seed, points=4, atoms=3), 0.05, 0.5
    arguments = kernel.log_features, kernel.gram, lam
    density = theory.optimal_log_density(*arguments) if optimal else kernel.random_log_density()
    leverage = theory.max_leverage(*arguments, density)
    # Beyond this the outcomes are too many to enumerate; fewer draws make the claim harder to meet, never easier.
    count = min(theory.required_features(leverage, t, delta), 400)
    counts = compositions(count)
    chances = probability(counts, kernel.base * density.exp())
    assert chances.sum().item() == pytest.approx(1.0, rel=1e-9)
    estimate = kernel.estimate(counts, density)
    values = torch.randn(4, 2, generator=kernel.generator, dtype=torch.float64)
    kernel_error, integral_error = errors(kernel, estimate, values)

    failed = kernel.deviation(estimate, lam) > math.sqrt(t)
    assert chances[failed].sum().item() <= delta
    assert (kernel_error[~failed] <= theory.kernel_error_bound(kernel.gram, lam, t, leverage)).all()
    assert (integral_error[~failed] <= theory.integral_error_bound(kernel.gram, lam, t, values)).all()
    # The claim can fail: with two draws it does, for a tolerance this small.
    if t == 0.3:
        few = compositions(2)
        failed = kernel.deviation(kernel.estimate(few, density), lam) > math.sqrt(t)
        assert probability(few, kernel.base * density.exp())[failed].sum().item() > 0.5


def test_the_bounds_by_hand():
    gram = torch.diag(torch.tensor([4.0, 2.0]))  # Σ = diag(2, 1): ‖Σ‖_HS² = 5, tr Σ = 3
    # N*_1 = 2/3 + 1/2, so tJ = ½ is the smaller remainder; N*_8 = 1/5 + 1/9, where the other one is.
    assert theory.kernel_error_bound(gram, 1.0, 0.25, 2.0) == pytest.approx(0.25 * 5 + 2 * 0.25 * 3 + 0.5)
    assert theory.kernel_error_bound(gram, 8.0, 1.0, 0.5) == pytest.approx(5 + 16 * 3 + 64 * (0.5 + 1 / 5 + 1 / 9))
    # v = (1, 1): <v, (Σ + I)v> = (3 + 2) / 2
    assert theory.integral_error_bound(gram, 1.0, 0.5, torch.ones(2)) == pytest.approx(0.5 * 3 * 2.5)


def gauss_hermite(width: int, nodes: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Atoms [Z, width] and probabilities [Z] that integrate N(0, I) as good as exactly."""
    points, weights = (torch.from_numpy(values) for values in np.polynomial.hermite_e.hermegauss(nodes))
    atoms = torch.cartesian_prod(*[points] * width).reshape(-1, width)
    return atoms, torch.cartesian_prod(*[weights / weights.sum()] * width).reshape(-1, width).prod(1)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("relative", [True, False])
def test_prf_reproduce_the_kernel_and_the_degrees_of_freedom(width, relative):
    scaling, lam = 0.6, 0.01
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    z, base = gauss_hermite(width)
    log_scale = theory.prf_log_trace(x, scaling) if relative else 0.0
    log_features = theory.prf_log_features(x, z, scaling, log_scale)
    gram = theory.prf_gram(x, scaling, log_scale)
    assert torch.allclose(log_features.exp() * base @ log_features.exp().T, gram, rtol=1e-9)
    expected = torch.stack([torch.stack([(scaling * a @ b).exp() for b in x]) for a in x]) / math.exp(log_scale)
    assert torch.allclose(gram, expected, rtol=1e-12)
    scores = theory.log_leverage(log_features, gram, lam).exp()
    assert (scores * base).sum().item() == pytest.approx(theory.degrees_of_freedom(gram, lam), rel=1e-8)


def test_prf_log_trace_makes_the_trace_one_and_degrees_of_freedom_those_of_the_profile():
    x = 2 * torch.randn(20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gram = theory.prf_gram(x, 0.5, theory.prf_log_trace(x, 0.5))
    assert torch.trace(gram / 20).item() == pytest.approx(1.0, rel=1e-12)
    spectrum = gram_spectrum(x, 0.5)
    assert theory.degrees_of_freedom(gram, 2**-8) == pytest.approx(profile_dof(spectrum, 2**-8, "trace"), rel=1e-9)
    raw = theory.prf_gram(x, 0.5)
    assert theory.degrees_of_freedom(raw, 0.1) == pytest.approx(profile_dof(spectrum, 0.1, "mean"), rel=1e-9)


def test_vectors_too_long_for_exp_are_fine_relative_to_the_trace():
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 20
    z = torch.randn(32, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with pytest.raises(DoflaError, match="prf_log_trace"):
        theory.prf_gram(x, 1.0)
    log_scale = theory.prf_log_trace(x, 1.0)
    gram, log_features = theory.prf_gram(x, 1.0, log_scale), theory.prf_log_features(x, z, 1.0, log_scale)
    assert 0.9 < theory.degrees_of_freedom(gram, 2**-8) < 16
    assert theory.log_leverage(log_features, gram, 2**-8).isfinite().all()
