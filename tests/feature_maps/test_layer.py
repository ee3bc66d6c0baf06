"""A layer with any grouping of heads, each with a size of its own, is the oracle applied to each head alone."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.attention import PackedTokens, naive_attention, rounded
from dofla.attention.heads import query_heads, select, write
from dofla.feature_maps import FEATURE_MAPS
from dofla.layers import layer_of
from dofla.plans.layers import FeatureLayer

HEAD_DIM, VALUE_DIM, SCALING = 5, 3, 0.6
MAPS = sorted(FEATURE_MAPS.keys() - {"none"})


def make_layer(features, seed=0, feature_map="prf", **options):
    plan = FeatureLayer("a", len(features), HEAD_DIM, VALUE_DIM, features, feature_map=feature_map, **options)
    layer = layer_of(plan).double()
    layer.reset_parameters(torch.Generator().manual_seed(seed))
    return layer


def make_vectors(seed, kv_heads, share, length, batch=2):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((kv_heads * share, HEAD_DIM), (kv_heads, HEAD_DIM), (kv_heads, VALUE_DIM))
    return [torch.randn(batch, h, length, d, generator=generator, dtype=torch.float64) for h, d in sizes]


def head_by_head(layer, query, key, value, *, scaling, **options):
    """Each group of heads alone: its own features, window and sinks, its own queries; rounded where it is in int8."""
    share = query.shape[1] // key.shape[1]
    out = value.new_empty(*query.shape[:-1], VALUE_DIM)
    for group in layer.groups:
        queries = query_heads(group.heads, share)
        q, k, v = select(query, queries), select(key, group.heads), select(value, group.heads)
        k, v = (rounded(k), rounded(v)) if group.int8 else (k, v)
        a, b = group.map.log_query(q, scaling), group.map.log_key(k, scaling)
        exact = {"window": group.window, "sinks": group.sinks, "query": q, "key": k, "scaling": scaling}
        write(naive_attention(a, b, v, **exact, **options), out, queries)
    return out


groupings = st.sampled_from([[4], [4, 4], [4, 2], [2, 4, 4, 2], [3, 1, 1, 3, 1], [5, 4, 3]])
windows, sink_counts = st.sampled_from([0, 1, 4, 50]), st.sampled_from([0, 1, 3])


@st.composite
def layers(draw):
    """Features of each head, window and sinks of each or of all."""
    features = draw(groupings)
    each = {"min_size": len(features), "max_size": len(features)}
    window, sinks = (draw(one | st.lists(one, **each)) for one in (windows, sink_counts))
    token_dtype, seed = draw(st.sampled_from(["model", "int8"])), draw(st.integers(0, 2**31))
    return make_layer(features, seed, window=window, sinks=sinks, token_dtype=token_dtype)


@settings(max_examples=40, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    layer=layers(),
    share=st.integers(1, 3),
    length=st.integers(1, 20),
    causal=st.booleans(),
    padded=st.booleans(),
)
def test_a_layer_is_the_oracle_head_by_head(seed, layer, share, length, causal, padded):
    vectors = make_vectors(seed, layer.kv_heads, share, length)
    weight = torch.ones(2, length, dtype=torch.float64) if padded else None
    if padded:
        weight[0, : seed % length] = 0
    options = {"scaling": SCALING, "weight": weight, "causal": causal}
    out, states = layer(*vectors, **options)
    torch.testing.assert_close(out, head_by_head(layer, *vectors, **options), rtol=1e-9, atol=1e-9)
    assert len(states) == (len(layer.groups) if causal else 0)


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("token_dtype", ["model", "int8"])
def test_every_map_in_a_layer_of_unequal_heads_is_the_oracle(feature_map, causal, token_dtype):
    layer = make_layer([3, 1, 3], 5, feature_map, window=[2, 4, 1], sinks=[1, 0, 1], token_dtype=token_dtype)
    vectors = make_vectors(6, 3, 2, 9)
    weight = (torch.arange(9) >= torch.tensor([[3], [0]])).double()
    options = {"scaling": SCALING, "weight": weight, "causal": causal}
    expected = head_by_head(layer, *vectors, **options)
    torch.testing.assert_close(layer(*vectors, **options)[0], expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=20, derandomize=True)
@given(seed=st.integers(0, 2**31), layer=layers(), cuts=st.lists(st.integers(1, 19), max_size=19))
def test_any_split_into_calls_is_one_call_and_keeps_the_same_state(seed, layer, cuts):
    vectors = make_vectors(seed, layer.kv_heads, 2, 20)
    whole, at_once = layer(*vectors, scaling=SCALING)
    states, pieces = None, []
    for start, stop in itertools.pairwise([0, *sorted(set(cuts)), 20]):
        out, states = layer(*(x[:, :, start:stop] for x in vectors), scaling=SCALING, states=states)
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces, dim=2), whole, rtol=1e-9, atol=1e-9)
    assert len(states) == len(at_once) == len(layer.groups)
    for group, state, other in zip(layer.groups, states, at_once, strict=True):
        for tokens, others in ((state.window, other.window), (state.sinks, other.sinks)):
            assert (tokens is None) == (others is None)
            if tokens is not None:
                assert isinstance(tokens, PackedTokens) == group.int8
                assert all(map(torch.equal, vars(tokens).values(), vars(others).values()))


@pytest.mark.parametrize("token_dtype", ["model", "int8"])
def test_a_layer_in_float32_decodes_as_it_prefills(token_dtype):
    layer = make_layer([4, 2, 4], window=[3, 5, 6], sinks=[1, 2, 1], token_dtype=token_dtype).float()
    vectors = [t.float() for t in make_vectors(1, 3, 2, 30)]
    whole, _ = layer(*vectors, scaling=SCALING)
    states, pieces = None, []
    for start, stop in ((0, 12), *((n, n + 1) for n in range(12, 30))):
        out, states = layer(*(t[:, :, start:stop] for t in vectors), scaling=SCALING, states=states)
        pieces.append(out)
    # Rounding to int8 is the same everywhere, so nothing of its size is between the two.
    torch.testing.assert_close(torch.cat(pieces, dim=2), whole, rtol=1e-5, atol=1e-5)


def test_gradients_pass_through_int8():
    query, key, value = (t.requires_grad_() for t in make_vectors(1, 3, 2, 9))
    sizes = {"window": [3, 5, 0], "sinks": 1}
    layer, plain = (make_layer([4, 2, 4], **sizes, token_dtype=kept) for kept in ("int8", "model"))
    out, _ = layer(query, key, value, scaling=SCALING)
    probe = torch.randn_like(out)
    got = torch.autograd.grad((out * probe).sum(), (query, key, value))
    near = [query, *(rounded(t).detach().requires_grad_() for t in (key, value))]
    out, _ = plain(*near, scaling=SCALING)
    torch.testing.assert_close(got, torch.autograd.grad((out * probe).sum(), near))


def test_heads_of_one_size_are_one_group():
    layer = make_layer([7, 3, 7, 7, 3], window=[4, 4, 4, 2, 4], sinks=[1, 1, 1, 1, 0])
    assert [group.heads for group in layer.groups] == [[0, 2], [1], [3], [4]]
    found = [(group.features, group.window, group.sinks) for group in layer.groups]
    assert found == [(7, 4, 1), (3, 4, 1), (7, 2, 1), (3, 4, 0)]
    assert [(own.heads, own.features) for own in layer.maps] == [(2, 7), (1, 3), (1, 7), (1, 3)]
    first, last = layer.maps[0].z  # drawn independently, as are those of another group
    assert not torch.equal(first, last)
    assert not torch.equal(first[:3], layer.maps[1].z[0])


def test_heads_that_were_selected_in_inference_mode_are_selected_with_gradients_later():
    x, heads = torch.randn(1, 5, 3, 2, requires_grad=True), (4, 1)
    with torch.inference_mode():
        select(x, heads)
    select(x, heads).sum().backward()
    assert torch.equal(x.grad.sum((0, 2, 3)), torch.tensor([0.0, 6, 0, 0, 6]))
