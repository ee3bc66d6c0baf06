"""Padding takes no place, wherever it stands: each sequence of a batch gets what it gets alone, call after call."""

from __future__ import annotations

import itertools

import pytest
import torch
from dofla.feature_maps.layer import LinearAttention
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.feature_maps import FEATURE_MAPS

DIM, SCALING, LENGTH = 8, 0.6, 36
TIER, SMALL = [(5, 3.0)], [(2, 3.0)]
EIGHT_BITS = {"sinks": 1, "token_dtype": "int8"}
KINDS = {
    "compressed": ([0] * 2, EIGHT_BITS | {"window": 3, "tiers": [TIER] * 2, "heavy_hitters": [4] * 2}),
    "ragged_compressed": (
        [0] * 3,
        EIGHT_BITS | {"window": [3, 5, 3], "tiers": [TIER, SMALL, TIER], "heavy_hitters": [4, 1, 4]},
    ),
    "tiers_and_features": ([4, 4], {"window": 3, "token_dtype": "int8", "tiers": [[(4, 4.0), (4, 2.0)]] * 2}),
    "hybrid": ([4, 4], {"window": 4, "sinks": 2, "token_dtype": "int8"}),
    "ragged_hybrid": ([4, 2, 4], {"window": [3, 0, 6], "sinks": [1, 2, 0]}),
    "window": ([0, 0], {"window": 6}),
    "sinks": ([3, 3], {"sinks": 3}),
    "features": ([4, 4], {}),
}


def make_layer(kind, dtype=torch.float64, feature_map="prf"):
    features, options = KINDS[kind]
    layer = LinearAttention(feature_map if any(features) else "none", features, DIM, **options).to(dtype)
    layer.reset_parameters(torch.Generator().manual_seed(1))
    return layer


def make_vectors(layer, batch, length, seed=0, dtype=torch.float64):
    generator, heads = torch.Generator().manual_seed(seed), len(layer.features)
    return [torch.randn(batch, h, length, DIM, generator=generator, dtype=dtype) for h in (2 * heads, heads, heads)]


def in_calls(layer, vectors, weight, bounds):
    """Outputs of all calls, zeros for padded queries; and the states after them."""
    states, outputs = None, []
    for start, stop in itertools.pairwise(bounds):
        part = None if weight is None else weight[:, start:stop]
        tokens = (x[:, :, start:stop] for x in vectors)
        out, states = layer(*tokens, scaling=SCALING, weight=part, states=states)
        outputs.append(out)
    out = torch.cat(outputs, 2)
    return out if weight is None else out * (weight > 0)[:, None, :, None], states


def each_alone(layer, vectors, weight):
    """The same of each sequence without its padding, in one call; and the state of each."""
    out, states = torch.zeros_like(vectors[0]), []
    for row, real in enumerate(weight > 0):
        own = None
        if real.any():
            tokens = (x[row : row + 1, :, real] for x in vectors)
            found, own = layer(*tokens, scaling=SCALING, weight=weight[row : row + 1, real])
            out[row, :, real] = found[0]
        states.append(own)
    return out, states


def some_weights(seed, batch, length, share):
    generator = torch.Generator().manual_seed(seed)
    real = torch.rand(batch, length, generator=generator) < share
    return real * torch.rand(batch, length, generator=generator).where(torch.tensor(seed % 2 == 0), torch.tensor(1.0))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 2**20),
    share=st.sampled_from([0.2, 0.5, 0.9]),
    cuts=st.lists(st.integers(1, LENGTH - 1), max_size=6),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_each_sequence_gets_what_it_gets_alone(kind, seed, share, cuts, dtype):
    layer = make_layer(kind, dtype)
    vectors, weight = make_vectors(layer, 3, LENGTH, seed, dtype), some_weights(seed, 3, LENGTH, share)
    out, states = in_calls(layer, vectors, weight, [0, *sorted(set(cuts)), LENGTH])
    expected, alone = each_alone(layer, vectors, weight)
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(out, expected, **tolerance)
    # What follows is the same too, so that all that was remembered is.
    more = make_vectors(layer, 3, 9, seed + 1, dtype)
    after, _ = layer(*more, scaling=SCALING, states=states)
    for row, own in enumerate(alone):
        single, _ = layer(*(x[row : row + 1] for x in more), scaling=SCALING, states=own)
        torch.testing.assert_close(after[row : row + 1], single, **tolerance)


@pytest.mark.parametrize("feature_map", sorted(FEATURE_MAPS.keys() - {"none"}))
@pytest.mark.parametrize("kind", ["hybrid", "ragged_hybrid", "features"])
def test_with_every_feature_map(feature_map, kind):
    layer = make_layer(kind, feature_map=feature_map)
    vectors, weight = make_vectors(layer, 3, LENGTH), some_weights(3, 3, LENGTH, 0.5)
    out, _ = in_calls(layer, vectors, weight, [0, 11, 12, 30, LENGTH])
    torch.testing.assert_close(out, each_alone(layer, vectors, weight)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_padding_in_front_is_left_where_it_is(kind):
    layer = make_layer(kind)
    vectors, weight = make_vectors(layer, 3, LENGTH), torch.ones(3, LENGTH)
    weight[0, :7], weight[1] = 0, 0
    plain = LinearAttention.forward.__wrapped__.__wrapped__
    as_it_is, _ = plain(layer, *vectors, scaling=SCALING, weight=weight)
    assert torch.equal(layer(*vectors, scaling=SCALING, weight=weight)[0], as_it_is)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_row_of_padding_keeps_its_state_and_the_others_do_not_notice(kind):
    layer = make_layer(kind)
    vectors, weight = make_vectors(layer, 3, LENGTH), torch.ones(3, LENGTH)
    weight[1, 20:] = 0
    _, begun = in_calls(layer, [x[:, :, :20] for x in vectors], None, [0, 20])
    _, after = in_calls(layer, vectors, weight, [0, 20, 21, LENGTH])
    row = torch.tensor([1])
    for state, other in zip(begun, after, strict=True):
        kept, same = state.reorder(row), other.reorder(row)
        torch.testing.assert_close(_numbers(kept), _numbers(same), rtol=0, atol=0)


def _numbers(part):
    if isinstance(part, torch.Tensor) or part is None:
        return [] if part is None else [part]
    parts = part if isinstance(part, tuple) else vars(part).values()
    return [number for inner in parts for number in _numbers(inner)]


@pytest.mark.parametrize("kind", ["hybrid", "ragged_hybrid", "window", "features"])
@pytest.mark.parametrize("keeps_states", [True, False])
def test_gradients_are_those_of_the_sequences_alone(kind, keeps_states):
    layer = make_layer(kind)
    vectors = [x.requires_grad_() for x in make_vectors(layer, 3, LENGTH)]
    weight = torch.ones(3, LENGTH)
    weight[0, 20:], weight[1, 5:14], weight[2, :9] = 0, 0, 0
    wanted = [*vectors, *layer.parameters()]
    out, _ = layer(*vectors, scaling=SCALING, weight=weight, keeps_states=keeps_states)
    out = out * weight[:, None, :, None]
    expected, _ = each_alone(layer, vectors, weight)
    found = [torch.autograd.grad(x.square().sum(), wanted, allow_unused=True) for x in (out, expected)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-8)


# What is kept in eight bits hands no gradients on to later calls.
@pytest.mark.parametrize("kind", ["ragged_hybrid", "window", "features"])
def test_gradients_pass_through_calls_that_go_on(kind):
    layer = make_layer(kind)
    vectors = [x.requires_grad_() for x in make_vectors(layer, 3, LENGTH)]
    weight = some_weights(5, 3, LENGTH, 0.6)
    out, _ = in_calls(layer, vectors, weight, [0, 9, 10, LENGTH])
    expected, _ = each_alone(layer, vectors, weight)
    found = [torch.autograd.grad(x.square().sum(), vectors) for x in (out, expected)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-8)


def test_padding_behind_is_left_where_it_is_if_nothing_goes_on_from_there(monkeypatch):
    layer, calls = make_layer("hybrid"), []
    vectors, weight = make_vectors(layer, 3, LENGTH), torch.ones(3, LENGTH)
    weight[0, 20:], weight[1, :5], weight[1, 30:] = 0, 0, 0
    look = torch.Tensor.argsort
    monkeypatch.setattr(torch.Tensor, "argsort", lambda *args, **options: calls.append(1) or look(*args, **options))
    out, _ = layer(*vectors, scaling=SCALING, weight=weight, keeps_states=False)
    assert not calls
    expected, _ = each_alone(layer, vectors, weight)
    torch.testing.assert_close(out * weight[:, None, :, None], expected, rtol=1e-9, atol=1e-9)
    layer(*vectors, scaling=SCALING, weight=weight)
    assert calls


def test_in_a_call_that_sees_both_ways_padding_stays_where_it_is():
    layer = make_layer("hybrid")
    vectors, weight = make_vectors(layer, 3, LENGTH), some_weights(3, 3, LENGTH, 0.5)
    plain = LinearAttention.forward.__wrapped__.__wrapped__
    options = {"scaling": SCALING, "weight": weight, "causal": False}
    assert torch.equal(layer(*vectors, **options)[0], plain(layer, *vectors, **options)[0])
