"""A layer with any grouping of heads, each with a size of its own, is the oracle applied to each head alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from dofla.feature_maps.layer import LinearAttention
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.attention import PackedTokens, naive_attention, rounded
from dofla.feature_maps import FEATURE_MAPS

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


def per_head(number, heads):
    return [number] * heads if isinstance(number, int) else list(number)


def head_by_head(layer, query, key, value, *, window=0, sinks=0, scaling, **options):
    """Each KV head alone: its own features, window and sinks, its own queries; in eight bits where the layer is."""
    if layer.token_dtype == "int8":
        key, value = rounded(key), rounded(value)
    share, outputs = query.shape[1] // key.shape[1], []
    window, sinks = (per_head(number, key.shape[1]) for number in (window, sinks))
    for head in range(key.shape[1]):
        group = next(n for n, members in enumerate(layer.groups) if head in members)
        of_all = [torch.zeros_like(t).repeat(1, len(layer.groups[group]), 1, 1) for t in (query[:, :share], key[:, :1])]
        place = layer.groups[group].index(head)
        q, k, v = query[:, head * share : (head + 1) * share], key[:, head : head + 1], value[:, head : head + 1]
        of_all[0][:, place * share : (place + 1) * share], of_all[1][:, place : place + 1] = q, k
        a = layer.maps[group].log_query(of_all[0], scaling)[:, place * share : (place + 1) * share]
        b = layer.maps[group].log_key(of_all[1], scaling)[:, place : place + 1]
        assert a.shape[-1] == layer.features[head]
        sizes = {"window": window[head], "sinks": sinks[head]}
        outputs.append(naive_attention(a, b, v, query=q, key=k, scaling=scaling, **sizes, **options))
    return torch.cat(outputs, dim=1)


def alone(layer, query, key, value, *, weight, causal, **options):
    """:func:`head_by_head`, where padding of causal calls is taken out first; zeros for padded queries."""
    if weight is None or not causal:
        return head_by_head(layer, query, key, value, weight=weight, causal=causal, **options)
    out = value.new_zeros(*query.shape[:-1], value.shape[-1])
    for row, real in enumerate(weight > 0):
        if real.any():
            tokens = (x[row : row + 1, :, real] for x in (query, key, value))
            weights = weight[row : row + 1, real]
            out[row, :, real] = head_by_head(layer, *tokens, weight=weights, causal=True, **options)[0]
    return out


def without_padded_queries(out, weight, causal):
    """What a padded query of a causal call gets is nobody's business."""
    return out if weight is None or not causal else out * (weight > 0)[:, None, :, None]


groupings = st.sampled_from([[4], [4, 4], [4, 2], [2, 4, 4, 2], [3, 1, 1, 3, 1], [5, 4, 3]])
windows, sink_counts = st.sampled_from([0, 1, 4, 50]), st.sampled_from([0, 1, 3])


@st.composite
def layer_sizes(draw):
    """(features, window, sinks): features of each head, window and sinks of each or of all."""
    features = draw(groupings)
    each = {"min_size": len(features), "max_size": len(features)}
    return features, *(draw(one | st.lists(one, **each)) for one in (windows, sink_counts))


@settings(max_examples=70, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    sizes=layer_sizes(),
    share=st.integers(1, 3),
    length=st.integers(1, 20),
    token_dtype=st.sampled_from(["model", "int8"]),
    causal=st.booleans(),
    padded=st.booleans(),
)
def test_forward_and_log_scores_are_the_oracle_head_by_head(seed, sizes, share, length, token_dtype, causal, padded):
    features, window, sinks = sizes
    layer = make_layer(features, seed, window=window, sinks=sinks, token_dtype=token_dtype)
    query, key, value = make_vectors(seed, len(features), share, length)
    weight = some_padding(seed, 2, length) if padded else None
    options = {"scaling": SCALING, "weight": weight, "causal": causal}
    # Without exact tokens nothing is kept in eight bits, and nothing rounded.
    layer.token_dtype = token_dtype if layer.is_hybrid else "model"
    expected = alone(layer, query, key, value, window=window, sinks=sinks, **options)
    layer.token_dtype = token_dtype
    got = without_padded_queries(layer(query, key, value, **options)[0], weight, causal)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)

    rows = torch.arange(length)[seed % min(3, length) :: 2]
    scores = layer.log_scores(query[:, :, rows], key, rows, **options)
    columns = torch.arange(length)
    hidden = (columns > rows[:, None]) & causal
    if weight is not None:
        hidden = hidden | (weight == 0)[:, None, None, :]
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1).nan_to_num(0)
    value = rounded(value) if layer.keeps_eight_bits else value
    by_scores = weights @ value.repeat_interleave(share, dim=1)
    by_scores = without_padded_queries(by_scores, None if weight is None else weight[:, rows], causal)
    torch.testing.assert_close(by_scores, expected[:, :, rows], rtol=1e-9, atol=1e-9)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    sizes=layer_sizes(),
    length=st.integers(1, 12),
    causal=st.booleans(),
    padded=st.booleans(),
)
def test_each_head_sees_its_own_window_and_its_own_sinks_exactly(seed, sizes, length, causal, padded):
    features, *exact = sizes
    weight = some_padding(seed, 2, length) if padded else None
    rows = torch.arange(length)[seed % min(3, length) :: 2]
    layer = make_layer(features, window=exact[0], sinks=exact[1])
    got = layer.seen_exactly(rows, length, share=2, weight=weight, causal=causal)
    window, sinks = (per_head(number, len(features)) for number in exact)
    got = got.expand(2, 2 * len(features), -1, -1)
    real = torch.ones(2, length) if weight is None else weight
    for batch, head, n, key in itertools.product(range(2), range(2 * len(features)), range(len(rows)), range(length)):
        row = int(rows[n])
        if causal and (key > row or not real[batch, row]):
            continue
        firsts = real[batch].nonzero().flatten().tolist()[: sinks[head // 2]]
        between = int(real[batch, key:row].sum()) if causal else abs(row - key)
        if real[batch, key] or not causal:
            assert got[batch, head, n, key] == (between < window[head // 2] or key in firsts)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    sizes=layer_sizes(),
    cuts=st.lists(st.integers(1, 19), max_size=5),
    token_dtype=st.sampled_from(["model", "int8"]),
    padded=st.booleans(),
)
def test_any_split_into_calls_is_one_call_and_keeps_the_same_state(seed, sizes, cuts, token_dtype, padded):
    features, window, sinks = sizes
    layer = make_layer(features, seed, window=window, sinks=sinks, token_dtype=token_dtype)
    query, key, value = make_vectors(seed, len(features), 2, 20)
    weight = some_padding(seed, 2, 20) if padded else None
    whole, at_once = layer(query, key, value, scaling=SCALING, weight=weight)
    states, pieces = None, []
    bounds = [0, *sorted(set(cuts)), 20]
    for start, stop in itertools.pairwise(bounds):
        part = [t[:, :, start:stop] for t in (query, key, value)]
        out, states = layer(
            *part, scaling=SCALING, states=states, weight=None if weight is None else weight[:, start:stop]
        )
        pieces.append(out)
    whole, pieces = (without_padded_queries(out, weight, True) for out in (whole, torch.cat(pieces, dim=2)))
    torch.testing.assert_close(pieces, whole, rtol=1e-9, atol=1e-9)
    assert len(states) == len(at_once) == len(layer.groups)
    for state, other in zip(states, at_once, strict=True):
        for tokens, others in ((state.window, other.window), (state.sinks, other.sinks)):
            assert (tokens is None) == (others is None)
            if tokens is not None:
                assert isinstance(tokens, PackedTokens) == (token_dtype == "int8")
                # Free places hold nothing, whatever their numbers are.
                assert all(torch.equal(a, b) for a, b in zip(vars(tokens).values(), vars(others).values(), strict=True))


@pytest.mark.parametrize("features", [[4, 4], [4, 2, 4]])
@pytest.mark.parametrize(("window", "sinks"), [(0, 0), (3, 1)])
@pytest.mark.parametrize("token_dtype", ["model", "int8"])
def test_decoding_step_by_step_is_one_call(features, window, sinks, token_dtype):
    layer = make_layer(features, window=window, sinks=sinks, token_dtype=token_dtype)
    query, key, value = make_vectors(1, len(features), 2, 9)
    whole, at_once = layer(query, key, value, scaling=SCALING)
    states, pieces = None, []
    for start, stop in ((0, 4), *((n, n + 1) for n in range(4, 9))):
        part = [t[:, :, start:stop] for t in (query, key, value)]
        out, states = layer(*part, scaling=SCALING, states=states)
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces, dim=2), whole)
    assert len(states) == len(at_once) == len(set(features))


@pytest.mark.parametrize("token_dtype", ["model", "int8"])
def test_a_layer_in_float32_decodes_as_it_prefills(token_dtype):
    layer = make_layer([4, 2, 4], window=[3, 5, 6], sinks=[1, 2, 1], token_dtype=token_dtype).float()
    query, key, value = (t.float() for t in make_vectors(1, 3, 2, 30))
    whole, _ = layer(query, key, value, scaling=SCALING)
    states, pieces = None, []
    for start, stop in ((0, 12), *((n, n + 1) for n in range(12, 30))):
        out, states = layer(*(t[:, :, start:stop] for t in (query, key, value)), scaling=SCALING, states=states)
        pieces.append(out)
    # Rounding in eight bits is the same everywhere, so nothing of its size is between the two.
    torch.testing.assert_close(torch.cat(pieces, dim=2), whole, rtol=1e-5, atol=1e-5)


def test_eight_bits_change_the_answer_by_about_their_rounding():
    query, key, value = make_vectors(1, 3, 2, 30)
    layers = [make_layer([4, 2, 4], window=8, sinks=1, token_dtype=kept) for kept in ("model", "int8")]
    whole, rough = (layer(query, key, value, scaling=SCALING)[0] for layer in layers)
    error = (whole - rough).abs().max() / whole.abs().max()
    assert 1e-4 < error < 0.05


def test_gradients_pass_through_eight_bits():
    query, key, value = (t.requires_grad_() for t in make_vectors(1, 3, 2, 9))
    layer = make_layer([4, 2, 4], window=[3, 5, 0], sinks=1, token_dtype="int8")
    out, _ = layer(query, key, value, scaling=SCALING)
    probe = torch.randn_like(out)
    got = torch.autograd.grad((out * probe).sum(), (query, key, value))
    layer.token_dtype = "model"
    near = [query, *(rounded(t).detach().requires_grad_() for t in (key, value))]
    out, _ = layer(*near, scaling=SCALING)
    torch.testing.assert_close(got, torch.autograd.grad((out * probe).sum(), near))


def test_heads_with_equally_many_features_are_one_group():
    layer = LinearAttention("prf", [7, 3, 7, 7, 3], HEAD_DIM, 4, 1)
    assert layer.groups == [[0, 2, 3], [1, 4]]
    assert layer.sizes == [(7, 4, 1), (3, 4, 1)]
    assert [(m.heads, m.features) for m in layer.maps] == [(3, 7), (2, 3)]


def test_heads_with_another_window_or_other_sinks_are_another_group():
    layer = LinearAttention("prf", [7, 3, 7, 7, 3], HEAD_DIM, [4, 4, 4, 2, 4], [1, 1, 1, 1, 0])
    assert layer.groups == [[0, 2], [1], [3], [4]]
    assert layer.sizes == [(7, 4, 1), (3, 4, 1), (7, 2, 1), (3, 4, 0)]
    assert layer.exact_tokens == [(4, 1), (4, 1), (2, 1), (4, 0)]
    assert [(m.heads, m.features) for m in layer.maps] == [(2, 7), (1, 3), (1, 7), (1, 3)]


def test_a_layer_is_hybrid_if_any_head_sees_tokens_exactly_and_keeps_eight_bits_if_told():
    def layer(window, sinks, token_dtype="int8"):
        return LinearAttention("prf", [3, 4], HEAD_DIM, window, sinks, token_dtype)

    assert [layer(*sizes).is_hybrid for sizes in ((0, 0), ([0, 2], 0), (0, [1, 0]), (2, 1))] == [
        False,
        True,
        True,
        True,
    ]
    assert [layer(*x).keeps_eight_bits for x in ((0, 0), ([0, 2], 0), (0, [1, 0]))] == [False, True, True]
    assert not layer(2, 1, "model").keeps_eight_bits


def test_hidden_tokens_are_seen_through_the_features():
    layer = make_layer([4, 2], window=[3, 1], sinks=1, token_dtype="int8")
    plain = make_layer([4, 2])
    assert [m.state_dict().keys() for m in layer.maps] == [m.state_dict().keys() for m in plain.maps]
    query, key, value = make_vectors(1, 2, 2, 9)
    expected, _ = plain(query, key, value, scaling=SCALING)
    rows = torch.tensor([3, 8])
    options = {"scaling": SCALING, "weight": None, "causal": True}
    before = layer(query, key, value, scaling=SCALING)[0]
    layer.hides_tokens = True
    assert layer.exact_tokens == [(0, 0), (0, 0)]
    assert not layer.is_hybrid
    past = torch.arange(9) <= rows[:, None]
    assert not (layer.seen_exactly(rows, 9, share=2, weight=None, causal=True) & past).any()
    torch.testing.assert_close(layer(query, key, value, scaling=SCALING)[0], expected)
    scores, expected = (x.log_scores(query[:, :, rows], key, rows, **options) for x in (layer, plain))
    torch.testing.assert_close(scores.masked_fill(~past, 0), expected.masked_fill(~past, 0))
    layer.hides_tokens = False
    assert torch.equal(layer(query, key, value, scaling=SCALING)[0], before)


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
@pytest.mark.parametrize("exact", [{"window": 2, "sinks": 1}, {"window": [2, 4, 1], "sinks": [1, 0, 1]}])
@pytest.mark.parametrize("token_dtype", ["model", "int8"])
def test_every_map_in_a_ragged_layer_is_the_oracle_head_by_head(feature_map, causal, exact, token_dtype):
    layer = make_layer([3, 1, 3], 5, feature_map, **exact, token_dtype=token_dtype)
    query, key, value = make_vectors(6, 3, 2, 9)
    options = {"scaling": SCALING, "weight": some_padding(6, 2, 9), "causal": causal}
    expected = alone(layer, query, key, value, **exact, **options)
    got = without_padded_queries(layer(query, key, value, **options)[0], options["weight"], causal)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_groups_of_heads_and_heads_of_a_group_are_drawn_independently():
    layer = make_layer([4, 2, 4], 5)
    first, last = layer.maps[0].z
    assert not torch.equal(first, last)
    assert not torch.equal(first[:2], layer.maps[1].z[0])
