"""Decoding for long: the state of many single steps in float32 against sums in float64."""

import math

import pytest
import torch
from arithmetic import sum_error
from forms import FORMS

from dofla.attention import FeatureState

FEATURES, VALUE_DIM = 8, 4
DECODING = pytest.mark.parametrize("form", [form for form in FORMS if form.id != "chunked"])


def drift(form, a, b, value):
    """Largest relative errors of outputs (values are positive) and of masses, a token at a time, seen ten times."""
    state = FeatureState.empty(*b.shape[:2], FEATURES, VALUE_DIM)
    seen = {}
    steps = b.shape[-2]
    for i in range(steps):
        here = slice(i, i + 1)
        out, normalizer, state = form(a[:, :, here], b[:, :, here], value[:, :, here], state=state)
        if (i + 1) % (steps // 10) == 0:
            seen[i] = out, normalizer, state.log_mass
    of_output = of_mass = 0.0
    wide, values = b.double(), value.double()
    for i, (out, normalizer, log_mass) in seen.items():
        expected_mass = wide[:, :, : i + 1].logsumexp(-2)
        mean = torch.softmax(wide[:, :, : i + 1], dim=-2).mT @ values[:, :, : i + 1]
        logits = a[:, :, i : i + 1].double() + expected_mass.unsqueeze(-2)
        expected = torch.softmax(logits, dim=-1) @ mean
        of_output = max(of_output, float(((out - expected).abs() / expected).max()))
        of_mass = max(of_mass, float((log_mass - expected_mass).abs().max()))
        of_mass = max(of_mass, float((normalizer - logits.logsumexp(-1)).abs().max()))
    return of_output, of_mass


def random_decode(steps):
    g = torch.Generator().manual_seed(0)
    a, b = (3 * torch.randn(1, 1, steps, FEATURES, generator=g) for _ in range(2))
    # Values that grow: a mean that hangs back shows.
    value = torch.rand(1, 1, steps, VALUE_DIM, generator=g) + torch.linspace(1, 3, steps).unsqueeze(-1)
    return a, b, value


@pytest.mark.long
@DECODING
def test_a_hundred_thousand_steps_do_not_drift(form):
    of_output, of_mass = drift(form, *random_decode(100_000))
    assert of_output < 1e-3
    assert of_mass < 1e-3


LEVEL, STEPS = 8000.0, 5000
"""A float32 near 8000 has steps of 4.9e-4; a key of 1/5000 of the mass adds less than half of that to its logarithm."""


def one_huge_key_then_many_tiny_ones():
    """The tiny ones together weigh as much as the huge one, and their values are three times as large."""
    b = torch.full((1, 1, STEPS + 1, FEATURES), LEVEL - math.log(STEPS))
    b[:, :, 0] = LEVEL
    value = torch.full((1, 1, STEPS + 1, VALUE_DIM), 3.0)
    value[:, :, 0] = 1
    return torch.zeros(1, 1, STEPS + 1, FEATURES), b, value


@DECODING
def test_many_tiny_keys_are_not_lost_beside_a_huge_one(form):
    of_output, of_mass = drift(form, *one_huge_key_then_many_tiny_ones())
    assert max(of_output, of_mass) < sum_error(1, LEVEL)  # the normalizer, in float32, is rounded twice
