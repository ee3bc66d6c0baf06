"""The compiled kernels: right, taken exactly where they may be, and leaving their inputs alone."""

import importlib
from itertools import pairwise
from math import isqrt

import pytest
import torch
from arithmetic import sum_error
from forms import (
    KernelCalls,
    Opaque,
    attend,
    error,
    everything,
    naive_normalizer,
    naive_state,
    needs_kernels,
    sample,
    threads,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.attention import LOG_ZERO, FeatureState, HybridState, TokenBuffer, compiled, naive_attention
from dofla.feature_maps import PRF

pytestmark = needs_kernels

SCALING = 0.7
TOLERANCE = sum_error(2, 50.0)
"""Of averages, relative to the largest value, and of logarithms. Log-features here are below about 50 in size; a weight
is the exponential of a sum of a few of them, each rounded by at most half of ``eps * 50``."""
_PAIRS = 2_000_000
"""Pairs of tokens times features that the truth writes out per example."""

SHAPES = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "heads": st.integers(1, 3),
        "groups": st.integers(1, 3),
        "head_dim": st.sampled_from([5, 8, 16, 20]),
        "value_dim": st.sampled_from([3, 6, 16, 40]),
        "features": st.sampled_from([1, 5, 16, 37, 64]),
        "spread": st.sampled_from([0.1, 0.5, 2.0]),
        "pad": st.sampled_from(["none", "left", "right", "fractional"]),
    }
)
LENGTHS = st.one_of(st.integers(1, 300), st.sampled_from([1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 192, 300]))
HYBRIDS = pytest.mark.parametrize("options", [{}, {"window": 5}, {"sinks": 2}, {"window": 5, "sinks": 2}], ids=str)
VIEWS = {
    "heads last": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "every second": lambda t: t.repeat_interleave(2, dim=2)[:, :, ::2],
    "inside wider rows": lambda t: torch.cat([t, t, t], dim=-1)[..., t.shape[-1] : 2 * t.shape[-1]],
    "columns first": lambda t: t.mT.contiguous().mT,
    "one token for all": lambda t: t[:, :, :1].expand_as(t),
}


def shortened(length: int, shape: dict) -> int:
    rows = shape["batch"] * shape["heads"] * shape["groups"] * shape["features"]
    return max(min(length, isqrt(_PAIRS // rows)), 1)


def plainly(*args, **options):
    """attend, in plain torch."""
    with pytest.MonkeyPatch.context() as patch, KernelCalls() as calls:
        patch.setattr(compiled, "usable", lambda *tensors: False)
        result = attend(*args, **options)
    assert not calls.names
    return result


def calls_of(*args, **options) -> KernelCalls:
    with KernelCalls() as calls:
        attend(*args, **options)
    return calls


def assert_states_agree(got: HybridState, expected: HybridState, value: torch.Tensor) -> None:
    filled = (expected.features.log_mass > LOG_ZERO / 2).unsqueeze(-1)  # the mean of no keys means nothing
    assert error(got.features.mean * filled, expected.features.mean * filled, value) < TOLERANCE
    assert got.features.log_mass.dtype == torch.float64
    torch.testing.assert_close(got.features.log_mass, expected.features.log_mass, rtol=sum_error(8), atol=TOLERANCE)
    for ours, theirs in ((got.window, expected.window), (got.sinks, expected.sinks)):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            present = theirs.log_weight > LOG_ZERO / 2
            assert torch.equal(ours.log_weight > LOG_ZERO / 2, present)
            for name in ("key", "value"):
                a, b = (getattr(buffer, name).double() * present[:, None, :, None] for buffer in (ours, theirs))
                assert torch.equal(a, b), name


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31), shape=SHAPES, length=LENGTHS, with_maps=st.booleans(), count=st.sampled_from([1, 2, 3])
)
def test_the_linear_kernel_is_the_oracle(seed, shape, length, with_maps, count):
    s = sample(seed, length=shortened(length, shape), **shape)
    a, b = s.log_features(SCALING)
    query, key, maps = s.query, s.key, s.features.affine(SCALING, torch.float32)
    if not with_maps:
        query, key, maps = a.float(), b.float(), None
        a, b = query.double(), key.double()
    value, log_weight = s.harmless_value, s.log_weight.double()
    empty = FeatureState.empty(*b.shape[:2], b.shape[-1], value.shape[-1])
    with threads(count):
        out, normalizer, state = compiled.linear_attention(query, TokenBuffer(key, value, s.log_weight), empty, maps)
    assert error(out, naive_attention(a, b, value.double(), weight=s.weight), s.value) < TOLERANCE
    torch.testing.assert_close(
        normalizer.double(), naive_normalizer(a, b, log_weight), rtol=sum_error(8), atol=TOLERANCE
    )
    assert_states_agree(HybridState(state), HybridState(naive_state(b, value.double(), log_weight)), s.value)


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**31),
    shape=SHAPES,
    length=LENGTHS,
    window=st.sampled_from([0, 0, 1, 2, 7, 33, 70, 130]),
    sinks=st.sampled_from([0, 0, 1, 3, 8, 17]),
    cuts=st.one_of(st.just([]), st.lists(st.integers(1, 299), max_size=5)),
    with_maps=st.booleans(),
    count=st.sampled_from([1, 2, 3]),
)
def test_attend_with_kernels_is_the_oracle_in_any_split(seed, shape, length, window, sinks, cuts, with_maps, count):
    s = sample(seed, length=shortened(length, shape), **shape)
    options = {"scaling": SCALING, "window": window, "sinks": sinks}
    features = s.features if with_maps else Opaque(s.features)
    bounds = [0, *sorted({c for c in cuts if c < s.key.shape[-2]}), s.key.shape[-2]]
    state, pieces = None, []
    with threads(count), KernelCalls() as calls:
        for start, stop in pairwise(bounds):
            part = (t[:, :, start:stop] for t in s.vectors)
            weight = None if s.weight is None else s.weight[:, start:stop]
            out, state = attend(*part, features, weight=weight, state=state, **options)
            pieces.append(out)
    assert calls.alone
    assert error(torch.cat(pieces, -2), s.naive(**options), s.value) < TOLERANCE
    # In float64, attend is plain torch, and itself tested against the oracle.
    _, expected = plainly(*(t.double() for t in s.vectors), s.features, weight=s.weight, **options)
    assert_states_agree(state, expected, s.value)


@pytest.mark.parametrize("options", [{}, {"window": 70, "sinks": 3}], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, 2), (1, 3), (5, 5)])
def test_results_do_not_depend_on_the_schedule(batch, heads, count, options):
    """Few heads for many threads are split into chunks; with 25 even three threads take whole heads."""
    s = sample(1, batch=batch, heads=heads, groups=2, length=200, features=16, pad="fractional")
    with threads(1):
        expected, _ = attend(*s.vectors, s.features, scaling=SCALING, weight=s.weight, **options)
    with threads(count):
        got, state = attend(*s.vectors, s.features, scaling=SCALING, weight=s.weight, **options)
    assert error(got, expected, s.value) < 1e-6
    _, plain = plainly(*(t.double() for t in s.vectors), s.features, scaling=SCALING, weight=s.weight, **options)
    assert_states_agree(state, plain, s.value)


@pytest.mark.parametrize("pad", ["none", "left", "fractional"])
@pytest.mark.parametrize("options", [{}, {"window": 1}, {"window": 130, "sinks": 17}, {"sinks": 3}], ids=str)
def test_calls_done_in_segments_are_the_oracle(options, pad, monkeypatch):
    s = sample(2, heads=2, groups=2, length=300, pad=pad)
    monkeypatch.setattr(importlib.import_module("dofla.attention.attend"), "_segment", lambda numbers, query: 128)
    options = {"scaling": SCALING, **options}
    got, state = attend(*s.vectors, s.features, weight=s.weight, **options)
    assert error(got, s.naive(**options), s.value) < TOLERANCE
    _, expected = plainly(*(t.double() for t in s.vectors), s.features, weight=s.weight, **options)
    assert_states_agree(state, expected, s.value)


@HYBRIDS
def test_kernels_are_taken_for_float32_and_half_precisions(options):
    s = sample(4, heads=2, groups=2)
    assert calls_of(*s.vectors, s.features, scaling=SCALING, **options).alone
    assert calls_of(*s.vectors, Opaque(s.features), scaling=SCALING, **options).alone
    half = [t.bfloat16() for t in s.vectors]
    assert calls_of(*half, s.features, scaling=SCALING, **options).alone


def test_kernels_are_taken_for_a_trainable_map_once_gradients_are_off():
    s = sample(5, heads=2, head_dim=8)
    prf = PRF(2, 8, 16)
    prf.reset_parameters(torch.Generator().manual_seed(0))
    options = {"scaling": SCALING, "window": 3}
    assert not calls_of(*s.vectors, prf, **options).names
    with torch.no_grad():
        assert calls_of(*s.vectors, prf, **options).alone
    with torch.inference_mode():
        assert calls_of(*s.vectors, prf, **options).alone


@HYBRIDS
def test_kernels_are_not_taken_where_they_cannot_be(options, monkeypatch):
    s = sample(6, heads=2, groups=2)
    options = {"scaling": SCALING, **options}
    assert not calls_of(*(t.double() for t in s.vectors), s.features, **options).names
    if "window" not in options:  # with one, the tokens are copied behind those of the window
        assert not calls_of(s.query, s.key, VIEWS["columns first"](s.value), s.features, **options).names
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not calls_of(*s.vectors, s.features, **options).names


@HYBRIDS
def test_gradients_are_those_of_plain_torch(options):
    """Each of a tensor that alone asks for them: a vector, key weights, or a part of the state."""
    s = sample(7, heads=2, groups=2, length=30)
    _, before = attend(*s.vectors, s.features, scaling=SCALING, **options)
    tensors = [*s.vectors, torch.linspace(0.1, 1, 30).unsqueeze(0), *everything(before)]
    for index in range(len(tensors)):
        leaves = [t.clone().requires_grad_(n == index) for n, t in enumerate(tensors)]
        *vectors, weight = leaves[:4]
        parts, gradients = leaves[4:], []
        for call in (attend, plainly):
            left = iter(parts)
            state = before.map(lambda _, left=left: next(left))
            out, _ = call(*vectors, s.features, scaling=SCALING, weight=weight, state=state, **options)
            gradients.append(torch.autograd.grad(out.square().sum(), leaves[index])[0])
        assert gradients[1].abs().max() > 0
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@HYBRIDS
def test_forward_mode_derivatives_are_those_of_plain_torch(options):
    s = sample(10, heads=2, groups=2, length=30)

    def tangent(call):
        run = lambda value: call(s.query, s.key, value, s.features, scaling=SCALING, **options)[0]  # noqa: E731
        return torch.func.jvp(run, (s.value,), (torch.ones_like(s.value),))[1]

    torch.testing.assert_close(tangent(attend), tangent(plainly))


@HYBRIDS
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_strided_views_give_the_same_as_contiguous_tensors(view, options):
    s = sample(11, batch=2, heads=2, groups=2, length=150, head_dim=20)
    views = [view(t) for t in s.vectors]
    assert not any(t.is_contiguous() for t in views)
    expected, after = attend(*(t.contiguous() for t in views), s.features, scaling=SCALING, **options)
    out, state = attend(*views, s.features, scaling=SCALING, **options)
    assert error(out, expected, s.value) < 1e-5
    assert_states_agree(state, after, s.value)


@HYBRIDS
@pytest.mark.parametrize("length", [1, 150])
@pytest.mark.parametrize("layout", ["transposed", "expanded", "every second"])
def test_key_weights_may_have_any_layout(layout, length, options):
    s = sample(13, batch=2, heads=2, groups=2, length=length)
    weight = {
        "transposed": torch.linspace(0, 1, 2 * length).view(length, 2).T,
        "expanded": torch.tensor([[0.3], [1.0]]).expand(2, length),
        "every second": torch.linspace(0, 1, 4 * length).view(2, -1)[:, ::2],
    }[layout]
    out, _ = attend(*s.vectors, s.features, scaling=SCALING, weight=weight, **options)
    expected, _ = attend(*s.vectors, s.features, scaling=SCALING, weight=weight.contiguous(), **options)
    assert error(out, expected, s.value) < 1e-6


@HYBRIDS
@pytest.mark.parametrize("length", [1, 30, 150])
def test_inputs_and_states_are_not_changed(length, options):
    s = sample(14, batch=2, heads=2, groups=2, length=length, pad="fractional")
    options = {"scaling": SCALING, "weight": s.weight, **options}
    _, state = attend(*s.vectors, s.features, **options)
    given_in = [*s.vectors, s.weight, *s.features.weights, *s.features.biases, *everything(state)]
    before = [t.clone() for t in given_in]
    with KernelCalls() as calls:
        attend(*s.vectors, s.features, state=state, **options)
    assert calls.alone
    assert all(torch.equal(now, then) for now, then in zip(given_in, before, strict=True))
