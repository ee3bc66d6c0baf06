"""Spectra and degrees of freedom against the plain Gram matrix, where that one can be formed."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.errors import DoflaError
from dofla.profiles.spectrum import NORMALIZATIONS, Spectrum, degrees_of_freedom, gram_spectrum

seeds = st.integers(0, 2**31 - 1)
lams = st.floats(-5.0, 1.0).map(lambda exponent: 10.0**exponent)
quick = settings(max_examples=50, deadline=None, derandomize=True)


def some_vectors(seed: int, count: int, dim: int, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(count, dim, generator=generator, dtype=torch.float64)


def vectors_of_length(scores: torch.Tensor, dim: int, scaling: float) -> torch.Tensor:
    """Random directions, with scaling · |x|² as given."""
    directions = torch.nn.functional.normalize(some_vectors(3, len(scores), dim), dim=-1)
    return directions * (scores / scaling).sqrt().unsqueeze(-1)


def plain_gram(vectors: torch.Tensor, scaling: float) -> torch.Tensor:
    return torch.exp(scaling * vectors @ vectors.mT)


@quick
@given(seed=seeds, count=st.integers(1, 40), dim=st.integers(1, 9), scaling=st.floats(0.05, 1.0))
def test_eigenvalues_are_those_of_the_plain_gram_matrix(seed, count, dim, scaling):
    vectors = some_vectors(seed, count, dim)
    spectrum = gram_spectrum(vectors, scaling)
    expected = torch.linalg.eigvalsh(plain_gram(vectors, scaling)).flip(0)
    got = spectrum.eigenvalues * math.exp(spectrum.log_scale)
    torch.testing.assert_close(got, expected.clamp_min(0), rtol=1e-9, atol=1e-12 * expected[0].item() * count)
    assert spectrum.retry is None
    assert (spectrum.eigenvalues.diff() <= 0).all()
    assert (spectrum.eigenvalues >= 0).all()


@quick
@given(
    seed=seeds,
    count=st.integers(1, 30),
    scaling=st.floats(0.05, 0.7),
    lam=st.floats(-3.0, 1.0).map(lambda exponent: 10.0**exponent),
    normalization=st.sampled_from(NORMALIZATIONS),
)
def test_every_normalization_is_the_trace_written_out(seed, count, scaling, lam, normalization):
    vectors = some_vectors(seed, count, 6)
    gram = plain_gram(vectors, scaling)
    unit = {
        "trace": gram.trace(),
        "top": torch.linalg.matrix_norm(gram, ord=2),
        "mean": torch.tensor(float(count)),
        "none": torch.tensor(1.0),
    }[normalization]
    sigma = gram / unit
    expected = torch.linalg.solve(sigma + lam * torch.eye(count, dtype=sigma.dtype), sigma).trace().item()
    assert degrees_of_freedom(gram_spectrum(vectors, scaling), lam, normalization) == pytest.approx(expected, rel=1e-8)


@quick
@given(seed=seeds, count=st.integers(1, 30), pair=st.tuples(lams, lams), normalization=st.sampled_from(NORMALIZATIONS))
def test_degrees_of_freedom_fall_with_lambda_and_stay_between_0_and_the_number_of_vectors(
    seed, count, pair, normalization
):
    spectrum = gram_spectrum(some_vectors(seed, count, 4), 0.5)
    small, large = (degrees_of_freedom(spectrum, lam, normalization) for lam in sorted(pair))
    assert 0 < large <= small <= count
    if max(pair) > 1.01 * min(pair):
        assert large < small


@quick
@given(seed=seeds, count=st.integers(1, 30), lam=lams)
def test_with_unit_trace_no_head_has_more_than_the_inverse_of_lambda(seed, count, lam):
    assert degrees_of_freedom(gram_spectrum(some_vectors(seed, count, 4, 3.0), 1.0), lam) <= 1 / lam


def test_the_order_of_the_vectors_plays_no_part():
    vectors = some_vectors(0, 20, 5)
    shuffled = vectors[torch.randperm(20, generator=torch.Generator().manual_seed(1))]
    torch.testing.assert_close(gram_spectrum(vectors, 0.4).eigenvalues, gram_spectrum(shuffled, 0.4).eigenvalues)


def test_equal_vectors_have_one_direction():
    spectrum = gram_spectrum(torch.ones(12, 3), 0.5)
    assert degrees_of_freedom(spectrum, 0.25) == pytest.approx(1 / 1.25)


@pytest.mark.parametrize("score", [120.0, 200.0, 2000.0])
def test_long_orthogonal_vectors_share_the_trace_equally(score):
    count, lam = 16, 2.0**-8
    spectrum = gram_spectrum(math.sqrt(score / 0.125) * torch.eye(count), 0.125)
    assert spectrum.log_scale == pytest.approx(score)
    assert degrees_of_freedom(spectrum, lam, "trace") == pytest.approx(count / (1 + count * lam))
    assert degrees_of_freedom(spectrum, lam, "top") == pytest.approx(count / (1 + lam))
    for normalization in ("mean", "none"):
        assert degrees_of_freedom(spectrum, lam, normalization) == pytest.approx(count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_vectors_of_real_length_give_finite_numbers(normalization, dtype):
    scores = torch.linspace(120, 200, 64, dtype=torch.float64)
    vectors = vectors_of_length(scores, 8, 0.125).to(dtype)
    spectrum = gram_spectrum(vectors, 0.125)
    assert torch.isfinite(spectrum.eigenvalues).all()
    assert 0 < degrees_of_freedom(spectrum, 2.0**-8, normalization) <= 64


def test_one_vector_far_longer_than_the_rest_is_all_there_is():
    scores = torch.full((32,), 120.0, dtype=torch.float64)
    scores[7] = 200.0
    spectrum = gram_spectrum(vectors_of_length(scores, 64, 0.125), 0.125)
    assert degrees_of_freedom(spectrum, 2.0**-4) == pytest.approx(1 / (1 + 2.0**-4))


@pytest.mark.parametrize(("failures", "retry"), [(0, None), (1, "jitter"), (2, "svd")])
@pytest.mark.parametrize("kind", ["raises", "returns NaN"])
def test_a_failing_solver_is_helped_and_the_help_recorded(monkeypatch, kind, failures, retry):
    vectors = some_vectors(5, 24, 6)
    expected = gram_spectrum(vectors, 0.4)
    solve, calls = torch.linalg.eigvalsh, []

    def failing(matrix):
        calls.append(matrix)
        if len(calls) > failures:
            return solve(matrix)
        if kind == "raises":
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return torch.full((len(matrix),), torch.nan, dtype=matrix.dtype)

    monkeypatch.setattr(torch.linalg, "eigvalsh", failing)
    spectrum = gram_spectrum(vectors, 0.4)
    assert spectrum.retry == retry
    assert (spectrum.eigenvalues.diff() <= 0).all()
    torch.testing.assert_close(spectrum.eigenvalues, expected.eigenvalues, rtol=1e-7, atol=1e-9)
    assert degrees_of_freedom(spectrum, 0.01) == pytest.approx(degrees_of_freedom(expected, 0.01), rel=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_vectors_that_are_not_finite_are_refused(value):
    vectors = some_vectors(0, 5, 3)
    vectors[2, 1] = value
    with pytest.raises(DoflaError, match="not finite"):
        gram_spectrum(vectors, 1.0)


@pytest.mark.parametrize("lam", [0.0, -1.0, math.nan, math.inf])
def test_lambda_must_be_a_positive_number(lam):
    with pytest.raises(DoflaError, match="lambda is"):
        degrees_of_freedom(Spectrum(torch.ones(3, dtype=torch.float64), 0.0), lam)


def test_an_unknown_normalization_lists_the_known_ones():
    with pytest.raises(DoflaError, match=r"'unit'.*trace, top, mean, none"):
        degrees_of_freedom(Spectrum(torch.ones(3, dtype=torch.float64), 0.0), 1.0, "unit")
