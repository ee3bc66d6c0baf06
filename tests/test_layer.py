"""A layer with any grouping of heads is the oracle applied to each head on its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.attention import naive_attention
from dofla.feature_maps import FEATURE_MAPS
from dofla.layer import LinearAttention

HEAD_DIM, VALUE_DIM, SCALING = 5, 3, 0.6


def make_layer(features, seed=0, feature_map="prf", **options):
    layer = LinearAttention(feature_map, features, HEAD_DIM, **options).double()
    layer.reset_parameters(torch.Generator().manual_seed(seed))
    return layer


def make_vectors(seed, kv_heads, share, length, batch=2):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((kv_heads * share, HEAD_DIM), (kv_heads, HEAD_DIM), (kv_heads, VALUE_DIM))
    return [torch.randn(batch, h, length, d, generator=generator, dtype=torch.float64) for h, d in sizes]


def some_padding(seed, batch, length):
    return (torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) > 0.4).double()


def head_by_head(layer, query, key, value, *, scaling, **options):
    """Each KV head alone: its own features, its own queries."""
    share, outputs = query.shape[1] // key.shape[1], []
    for head in range(key.shape[1]):
        group = next(n for n, members in enumerate(layer.groups) if head in members)
        of_all = [torch.zeros_like(t).repeat(1, len(layer.groups[group]), 1, 1) for t in (query[:, :share], key[:, :1])]
        place = layer.groups[group].index(head)
        q, k, v = query[:, head * share : (head + 1) * share], key[:, head : head + 1], value[:, head : head + 1]
        of_all[0][:, place * share : (place + 1) * share], of_all[1][:, place : place + 1] = q, k
        a = layer.maps[group].log_query(of_all[0], scaling)[:, place * share : (place + 1) * share]
        b = layer.maps[group].log_key(of_all[1], scaling)[:, place : place + 1]
        assert a.shape[-1] == layer.features[head]
        sizes = {"window": layer.window, "sinks": layer.sinks}
        outputs.append(naive_attention(a, b, v, query=q, key=k, scaling=scaling, **sizes, **options))
    return torch.cat(outputs, dim=1)


groupings = st.sampled_from([[4], [4, 4], [4, 2], [2, 4, 4, 2], [3, 1, 1, 3, 1], [5, 4, 3]])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    features=groupings,
    share=st.integers(1, 3),
    length=st.integers(1, 20),
    window=st.sampled_from([0, 1, 4, 50]),
    sinks=st.sampled_from([0, 2]),
    causal=st.booleans(),
    padded=st.booleans(),
)
def test_forward_and_log_scores_are_the_oracle_head_by_head(
    seed, features, share, length, window, sinks, causal, padded
):
    layer = make_layer(features, seed, window=window, sinks=sinks)
    query, key, value = make_vectors(seed, len(features), share, length)
    weight = some_padding(seed, 2, length) if padded else None
    options = {"scaling": SCALING, "weight": weight, "causal": causal}
    expected = head_by_head(layer, query, key, value, **options)
    got, _ = layer(query, key, value, **options)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)

    rows = torch.arange(length)[seed % min(3, length) :: 2]
    scores = layer.log_scores(query[:, :, rows], key, rows, **options)
    columns = torch.arange(length)
    hidden = (columns > rows[:, None]) & causal
    if weight is not None:
        hidden = hidden | (weight == 0)[:, None, None, :]
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1).nan_to_num(0)
    by_scores = weights @ value.repeat_interleave(share, dim=1)
    torch.testing.assert_close(by_scores, expected[:, :, rows], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("features", [[4, 4], [4, 2, 4]])
@pytest.mark.parametrize(("window", "sinks"), [(0, 0), (3, 1)])
def test_decoding_step_by_step_is_one_call(features, window, sinks):
    layer = make_layer(features, window=window, sinks=sinks)
    query, key, value = make_vectors(1, len(features), 2, 9)
    whole, at_once = layer(query, key, value, scaling=SCALING)
    states, pieces = None, []
    for start, stop in ((0, 4), *((n, n + 1) for n in range(4, 9))):
        part = [t[:, :, start:stop] for t in (query, key, value)]
        out, states = layer(*part, scaling=SCALING, states=states)
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces, dim=2), whole)
    assert len(states) == len(at_once) == len(set(features))


def test_heads_with_equally_many_features_are_one_group():
    layer = LinearAttention("prf", [7, 3, 7, 7, 3], HEAD_DIM)
    assert layer.groups == [[0, 2, 3], [1, 4]]
    assert [(m.heads, m.features) for m in layer.maps] == [(3, 7), (2, 3)]


def test_splitting_and_joining_gives_the_heads_back():
    layer = LinearAttention("prf", [7, 3, 3, 7, 5], HEAD_DIM)
    query, key, value = make_vectors(2, 5, 3, 4)
    parts = layer.split(query, key, value)
    assert torch.equal(layer.join([q for q, _, _ in parts], 3), query)
    assert torch.equal(layer.join([k for _, k, _ in parts], 1), key)
    assert torch.equal(layer.join([v for _, _, v in parts], 1), value)


def test_a_bidirectional_call_leaves_no_state():
    query, key, value = make_vectors(3, 2, 1, 6)
    _, states = make_layer([4, 2])(query, key, value, scaling=SCALING, causal=False)
    assert states == []


@pytest.mark.parametrize("feature_map", sorted(FEATURE_MAPS))
def test_parameters_and_buffers_are_drawn_from_the_generator_alone(feature_map):
    one, other = (make_layer([4, 2, 4], 5, feature_map) for _ in range(2))
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)
    assert all(torch.isfinite(tensor).all() for tensor in one.state_dict().values())


@pytest.mark.parametrize("feature_map", sorted(FEATURE_MAPS))
@pytest.mark.parametrize("causal", [True, False])
def test_every_map_in_a_ragged_layer_is_the_oracle_head_by_head(feature_map, causal):
    layer = make_layer([3, 1, 3], 5, feature_map, window=2, sinks=1)
    query, key, value = make_vectors(6, 3, 2, 9)
    options = {"scaling": SCALING, "weight": some_padding(6, 2, 9), "causal": causal}
    expected = head_by_head(layer, query, key, value, **options)
    torch.testing.assert_close(layer(query, key, value, **options)[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("training", "carried", "told"), [(True, False, 2), (True, True, 0), (False, False, 0)])
def test_maps_are_told_of_passes_over_whole_sequences_in_training(monkeypatch, training, carried, told):
    layer, calls = make_layer([4, 2]), []
    monkeypatch.setattr(type(layer.maps[0]), "new_training_pass", lambda feature_map: calls.append(feature_map))
    query, key, value = make_vectors(1, 2, 2, 9)
    states = layer.eval()(query, key, value, scaling=SCALING)[1] if carried else None
    layer.train(training)(query, key, value, scaling=SCALING, states=states)
    assert len(calls) == told


def test_groups_of_heads_and_heads_of_a_group_are_drawn_independently():
    layer = make_layer([4, 2, 4], 5)
    first, last = layer.maps[0].z
    assert not torch.equal(first, last)
    assert not torch.equal(first[:2], layer.maps[1].z[0])
