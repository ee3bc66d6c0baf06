"""Spectra and degrees of freedom against the plain Gram matrix, where that one can be formed."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.errors import DoflaError
from dofla.profiles.spectrum import (
    NORMALIZATIONS,
    SUBSAMPLES,
    Spectrum,
    attention_spectrum,
    degrees_of_freedom,
    gram_spectrum,
    standard_error,
)

seeds = st.integers(0, 2**31 - 1)
quick = settings(max_examples=25, derandomize=True)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"lam": lam}, "lambda is") for lam in (0.0, -1.0, math.nan, math.inf)),
        ({"lam": 1.0, "normalization": "unit"}, r"'unit'.*trace, top, mean, none"),
    ],
)
def test_a_bad_option_is_named(options, message):
    with pytest.raises(DoflaError, match=message):
        degrees_of_freedom(Spectrum(torch.ones(3, dtype=torch.float64), 0.0), **options)


@quick
@given(
    seed=seeds,
    rows=st.integers(1, 12),
    columns=st.integers(1, 12),
    lam=st.floats(-4.0, 1.0).map(lambda exponent: 10.0**exponent),
)
def test_degrees_of_freedom_of_attention_are_those_of_the_inner_products_of_its_rows(seed, rows, columns, lam):
    attention = some_vectors(seed, rows, columns, 2.0).softmax(-1)
    values, retry = attention_spectrum(attention)
    assert retry is None
    sigma = torch.tensor([[(a * b).sum() for b in attention] for a in attention]) / rows
    expected = torch.linalg.solve(sigma + lam * torch.eye(rows, dtype=sigma.dtype), sigma).trace().item()
    assert degrees_of_freedom(Spectrum(values, 0.0), lam, "mean") == pytest.approx(expected, rel=1e-8)


def test_attention_to_one_token_each_has_as_many_degrees_as_rows_and_attention_to_all_has_one():
    lam = 2.0**-8
    alone, _ = attention_spectrum(torch.eye(16))
    even, _ = attention_spectrum(torch.full((16, 40), 1 / 40))
    assert degrees_of_freedom(Spectrum(alone, 0.0), lam) == pytest.approx(16 / (1 + 16 * lam))
    assert degrees_of_freedom(Spectrum(even, 0.0), lam) == pytest.approx(1 / (1 + lam))
    # Divided by the number of rows, each row counts with its own weight: 1 on a single token, 1/40 on forty.
    assert degrees_of_freedom(Spectrum(alone, 0.0), lam, "mean") == pytest.approx(16 / (1 + 16 * lam))
    assert degrees_of_freedom(Spectrum(even, 0.0), lam, "mean") == pytest.approx(1 / (1 + 40 * lam))


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_windows_are_averaged_and_rows_of_zeros_count_for_nothing(normalization):
    attention = some_vectors(1, 5 * 12, 9).view(5, 12, 9).softmax(-1)
    values, _ = attention_spectrum(attention)
    each = [degrees_of_freedom(Spectrum(own, 0.0), 0.01, normalization) for own in values]
    spectrum = Spectrum(values, 0.0)
    assert degrees_of_freedom(spectrum, 0.01, normalization) == pytest.approx(sum(each) / 5)
    spread = torch.tensor(each, dtype=torch.float64).std().item()
    assert standard_error(spectrum, 0.01, normalization) == pytest.approx(spread / 5**0.5)
    filled, _ = attention_spectrum(torch.nn.functional.pad(attention, (0, 0, 0, 3)))
    if normalization != "mean":  # which divides by the number of rows
        found = degrees_of_freedom(Spectrum(filled, 0.0), 0.01, normalization)
        assert found == pytest.approx(sum(each) / 5, rel=1e-9)


def test_the_papers_estimate_is_doubted_where_its_subsamples_differ():
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(256, 8, generator=generator, dtype=torch.float64)
    calm = gram_spectrum(vectors / vectors.norm(dim=-1, keepdim=True), 1.0)
    assert calm.subsamples.shape == (SUBSAMPLES, 32)
    for part, values in zip(vectors.chunk(SUBSAMPLES), calm.subsamples, strict=True):
        expected = torch.linalg.eigvalsh(plain_gram(part / part.norm(dim=-1, keepdim=True), 1.0)).flip(0)
        torch.testing.assert_close(
            values * math.exp(calm.log_scale), expected.clamp_min(0), rtol=1e-9, atol=1e-12 * 256
        )
    # Nothing is known of the error of a single matrix.
    assert gram_spectrum(vectors[: 2 * SUBSAMPLES - 1], 1.0).subsamples is None
    assert math.isnan(standard_error(Spectrum(torch.ones(3, dtype=torch.float64), 0.0), 0.1))
    heavy = gram_spectrum(vectors * (1 + 3 * torch.arange(256).eq(7))[:, None], 1.0)
    for spectrum, low, high in ((calm, 0, 0.05), (heavy, 0.2, 10)):
        assert low < standard_error(spectrum, 2.0**-8) / degrees_of_freedom(spectrum, 2.0**-8) < high
