"""Padding takes no place, wherever it stands: each sequence of a batch gets what it gets alone, call after call."""

import itertools
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.feature_maps import FEATURE_MAPS
from dofla.integration.padding import run_padded
from dofla.layers import layer_of
from dofla.plans.layers import CompressedLayer, FeatureLayer

DIM, SCALING, LENGTH = 8, 0.6, 36
COMPRESSED = {"window": 3, "sinks": 1, "newest": 5, "heavy_hitters": 4}
KINDS = {
    "compressed": (2, COMPRESSED),
    "unequal_compressed": (3, COMPRESSED | {"window": [3, 5, 3], "newest": [5, 2, 5], "heavy_hitters": [4, 1, 4]}),
    "hybrid": (2, {"features": 4, "window": 4, "sinks": 2, "token_dtype": "int8"}),
    "unequal_hybrid": (3, {"features": [4, 2, 4], "window": [3, 0, 6], "sinks": [1, 2, 0]}),
    "window": (2, {"features": 0, "window": 6, "feature_map": "none"}),
    "sinks": (2, {"features": 3, "sinks": 3}),
    "features": (2, {"features": 4}),
}
WITH_GRADIENTS = [("hybrid", way) for way in ("keeps states", "keeps none")]  # int8 states hold no gradients
WITH_GRADIENTS += product(["unequal_hybrid", "window", "features"], ["keeps states", "keeps none", "goes on"])


def make_layer(kind, dtype=torch.float64, **options):
    heads, sizes = KINDS[kind]
    plan = (CompressedLayer if "newest" in sizes else FeatureLayer)("a", heads, DIM, DIM, **sizes, **options)
    layer = layer_of(plan)
    layer = layer.to(dtype) if isinstance(plan, FeatureLayer) else layer
    layer.reset_parameters(torch.Generator().manual_seed(1))
    return layer


def make_vectors(layer, batch, length, seed=0, dtype=torch.float64):
    generator, heads = torch.Generator().manual_seed(seed), layer.kv_heads
    return [torch.randn(batch, h, length, DIM, generator=generator, dtype=dtype) for h in (2 * heads, heads, heads)]


def call(layer, vectors, weight, states=None, keeps_states=True):
    """A call as a model makes it."""
    run = partial(layer, scaling=SCALING)
    if weight is None:
        return run(*vectors, states=states)
    vectors = (*vectors, weight, None)
    return run_padded(run, vectors, states, keeps_states=keeps_states, in_place=False, join=layer.joined)


def in_calls(layer, vectors, weight, bounds):
    """Outputs of all calls, zeros for padded queries; and the states after them."""
    states, outputs = None, []
    for start, stop in itertools.pairwise(bounds):
        part = None if weight is None else weight[:, start:stop]
        out, states = call(layer, [x[:, :, start:stop] for x in vectors], part, states)
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


@settings(max_examples=40, derandomize=True)
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
def test_with_every_feature_map(feature_map):
    layer = make_layer("unequal_hybrid", feature_map=feature_map)
    vectors, weight = make_vectors(layer, 3, LENGTH), some_weights(3, 3, LENGTH, 0.5)
    out, _ = in_calls(layer, vectors, weight, [0, 11, 12, 30, LENGTH])
    torch.testing.assert_close(out, each_alone(layer, vectors, weight)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_padding_in_front_is_left_where_it_is(kind):
    layer = make_layer(kind)
    vectors, weight = make_vectors(layer, 3, LENGTH), torch.ones(3, LENGTH)
    weight[0, :7], weight[1] = 0, 0
    as_it_is, _ = layer(*vectors, scaling=SCALING, weight=weight)
    assert torch.equal(call(layer, vectors, weight)[0], as_it_is)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_row_of_padding_keeps_its_state_and_the_others_do_not_notice(kind):
    layer = make_layer(kind)
    vectors, weight = make_vectors(layer, 3, LENGTH), torch.ones(3, LENGTH)
    weight[1, 20:] = 0
    _, begun = in_calls(layer, [x[:, :, :20] for x in vectors], None, [0, 20])
    _, after = in_calls(layer, vectors, weight, [0, 20, 21, LENGTH])
    for before, now in zip(begun, after, strict=True):
        kept = []
        for state in (before, now):
            kept.append([])
            state.reorder(torch.tensor([1])).map(lambda t, found=kept[-1]: found.append(t) or t)
        assert all(map(torch.equal, *kept))


@pytest.mark.parametrize(("kind", "way"), WITH_GRADIENTS)
def test_gradients_are_those_of_the_sequences_alone(kind, way):
    layer = make_layer(kind)
    vectors = [x.requires_grad_() for x in make_vectors(layer, 3, LENGTH)]
    weight = torch.ones(3, LENGTH)
    weight[0, 20:], weight[1, 5:14], weight[2, :9] = 0, 0, 0
    if way == "goes on":
        out, _ = in_calls(layer, vectors, weight, [0, 9, 10, LENGTH])
    else:
        out, _ = call(layer, vectors, weight, keeps_states=way == "keeps states")
    wanted = [*vectors, *layer.parameters()]
    answers = (out * weight[:, None, :, None], each_alone(layer, vectors, weight)[0])
    found = [torch.autograd.grad(x.square().sum(), wanted, allow_unused=True) for x in answers]
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-8)


def test_padding_behind_is_left_where_it_is_if_nothing_goes_on_from_there(monkeypatch):
    layer, calls = make_layer("hybrid"), []
    vectors, weight = make_vectors(layer, 3, LENGTH), torch.ones(3, LENGTH)
    weight[0, 20:], weight[1, :5], weight[1, 30:] = 0, 0, 0
    look = torch.Tensor.argsort
    monkeypatch.setattr(torch.Tensor, "argsort", lambda *args, **options: calls.append(1) or look(*args, **options))
    out, _ = call(layer, vectors, weight, keeps_states=False)
    assert not calls
    expected, _ = each_alone(layer, vectors, weight)
    torch.testing.assert_close(out * weight[:, None, :, None], expected, rtol=1e-9, atol=1e-9)
    call(layer, vectors, weight)
    assert calls
