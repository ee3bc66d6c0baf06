"""Error curves against brute force, and against what theory says they cannot cross."""

import json
import math

import pytest
import torch

from dofla.paper import theory
from dofla.paper.error_curve import METHODS, best_rank_errors, error_curve, features_needed, theorem_errors
from dofla.paper.sampling import leverage_features
from dofla.profiles.tolerance import DEFAULT_LAMBDA

SCALING, SIZES = 0.5, (4, 32)


def vectors(count: int, width: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def curve():
    return error_curve(vectors(6), vectors(5, seed=1), SCALING, sizes=SIZES, seeds=3, candidates=500)


def naive_errors(queries, keys, z, log_alpha):
    """Relative kernel error and mean KL, entry by entry."""
    x = torch.cat([queries, keys])

    def approximate(a, b):
        exponents = [
            math.sqrt(SCALING) * (w @ (a + b)).item() - SCALING / 2 * (a @ a + b @ b).item() + log.item()
            for w, log in zip(z, log_alpha, strict=True)
        ]
        return sum(map(math.exp, exponents)) / len(z)

    pairs = [(math.exp(SCALING * (a @ b).item()), approximate(a, b)) for a in x for b in x]
    kernel = math.sqrt(sum((k - e) ** 2 for k, e in pairs) / sum(k * k for k, _ in pairs))
    kl = 0.0
    for query in queries:
        true = torch.tensor([math.exp(SCALING * (query @ key).item()) for key in keys], dtype=torch.float64)
        guess = torch.tensor([approximate(query, key) for key in keys], dtype=torch.float64)
        true, guess = true / true.sum(), guess / guess.sum()
        kl += (true * (true / guess).log()).sum().item() / len(queries)
    return kernel, kl


@pytest.mark.parametrize("method", ["iid", "leverage"])
def test_measured_errors_are_those_of_the_definition(curve, method):
    queries, keys = vectors(6), vectors(5, seed=1)
    found = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        if method == "iid":
            z, log_alpha = torch.randn(32, 3, generator=generator, dtype=torch.float64), torch.zeros(32)
        else:
            x = torch.cat([queries, keys])
            z, log_alpha = leverage_features(x, SCALING, 32, DEFAULT_LAMBDA, candidates=500, generator=generator)
        found.append([naive_errors(queries, keys, z[:size], log_alpha[:size]) for size in SIZES])
    table = torch.tensor(found, dtype=torch.float64)
    for n, name in enumerate(("kernel", "kl")):
        measured = curve["measured"][method][name]
        assert measured["mean"] == pytest.approx(table[..., n].mean(0).tolist(), rel=1e-9)
        assert measured["spread"] == pytest.approx(table[..., n].std(0).tolist(), rel=1e-9)


def test_a_curve_is_plain_data_with_everything_in_it(curve):
    assert json.loads(json.dumps(curve)) == curve
    assert set(curve["measured"]) == set(METHODS)
    gram = theory.prf_gram(torch.cat([vectors(6), vectors(5, seed=1)]), SCALING)
    trace = gram.trace().item() / 11
    assert curve["degrees_of_freedom"] == pytest.approx(theory.degrees_of_freedom(gram, DEFAULT_LAMBDA * trace))
    assert curve["required_features"] == theory.required_features(curve["degrees_of_freedom"], 1.0, 0.1)
    for measured in curve["measured"].values():
        assert all(least <= error for least, error in zip(curve["best_rank"], measured["kernel"]["mean"], strict=True))


def test_fresh_vectors_are_fitted_nowhere():
    options = {"sizes": (16,), "seeds": 2, "methods": ("iid", "leverage"), "candidates": 100}
    queries, keys, fit = vectors(6), vectors(6, seed=1), vectors(9, seed=2)
    found = error_curve(queries, keys, SCALING, fit=fit, **options)["measured"]
    own = error_curve(queries, keys, SCALING, **options)["measured"]
    assert found["iid"] == own["iid"]
    kernels = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        drawn = leverage_features(fit, SCALING, 16, 2**-8, candidates=100, generator=generator)
        kernels.append(naive_errors(queries, keys, *drawn)[0])
    assert found["leverage"]["kernel"]["mean"] == pytest.approx([sum(kernels) / 2])


def test_no_kernel_of_that_rank_is_closer():
    gram = theory.prf_gram(vectors(12), SCALING)
    values, directions = torch.linalg.eigh(gram)
    for size, error in zip((0, 1, 5, 12), best_rank_errors(gram, (0, 1, 5, 12)), strict=True):
        top = directions[:, 12 - size :] * values[12 - size :] @ directions[:, 12 - size :].T
        assert error == pytest.approx((torch.linalg.norm(gram - top) / torch.linalg.norm(gram)).item(), abs=1e-7)


def test_the_theorems_curve_is_a_bound_that_can_be_had():
    gram = theory.prf_gram(vectors(20), SCALING)
    sizes, delta = (1, 100, 1000, 100_000), 0.1
    found = theorem_errors(gram, sizes, delta)
    assert found[0] is None
    assert found[1] > found[2] > found[3] > 0
    # By brute force over λ and t none is lower, and one is as low.
    trace, norm = gram.trace().item() / 20, torch.linalg.norm(gram / 20).item()
    best = math.inf
    for lam in [trace * 2.0**n for n in range(-16, 1)]:
        dof = theory.degrees_of_freedom(gram, lam)
        for t in torch.logspace(-4, math.log10(3), 120, dtype=torch.float64).tolist():
            if theory.required_features(dof, min(t, 3.0), delta) <= 1000:
                best = min(best, theory.kernel_error_bound(gram, lam, min(t, 3.0), dof))
    assert found[2] <= math.sqrt(best) / norm * (1 + 1e-9)
    assert found[2] == pytest.approx(math.sqrt(best) / norm, rel=0.05)


def test_features_needed_is_the_integral_it_stands_for():
    """In one dimension E_q[(‖φ‖² / q)²] is a sum over a fine grid of z."""
    x = vectors(6, 1)
    z = torch.linspace(-30, 30, 20_001, dtype=torch.float64)[:, None]
    base = (-z[:, 0].square() / 2).exp()
    base /= base.sum()
    gram = theory.prf_gram(x, SCALING, theory.prf_log_trace(x, SCALING))
    log_features = theory.prf_log_features(x, z, SCALING, theory.prf_log_trace(x, SCALING))
    fourth = (2 * log_features).exp().mean(0).square()
    density = theory.optimal_log_density(log_features, gram, 2**-6).exp()
    for method, q, slack in (("iid", 1.0, 1e-6), ("leverage", density, 0.06)):
        variance = (base * fourth / q).sum() / gram.square().mean() - 1
        found = features_needed(x, SCALING, method, error=0.2, lam=2**-6, draws=4000, candidates=16_000)
        assert found == pytest.approx(variance.item() / 0.2**2, rel=slack)


def test_leverage_needs_a_bounded_number_however_long_the_vectors():
    x = vectors(30, 8)
    x *= (torch.linspace(10, 300, 30).double() / x.square().sum(1)).sqrt()[:, None]  # s|x|² up to 150
    gram = theory.prf_gram(x, SCALING, theory.prf_log_trace(x, SCALING))
    dof, sigma = theory.degrees_of_freedom(gram, 2**-8), gram / 30
    bound = dof * (torch.linalg.matrix_norm(sigma, ord=2) + 2**-8) / sigma.square().sum() / 0.25
    assert 0 < features_needed(x, SCALING, "leverage") < bound
    assert features_needed(x, SCALING, "iid") > 1e200
    assert features_needed(2 * x, SCALING, "iid") == math.inf
