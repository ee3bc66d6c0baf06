"""Exact prefill: outputs are those of softmax attention in float64, and the retained tokens those of highest score."""

from __future__ import annotations

import pytest
import torch
from arithmetic import sum_error
from dofla.feature_maps.layer import LinearAttention
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.attention import LOG_ZERO, Moments
from dofla.attention.constants import DECAY
from dofla.attention.drawn import LATELY, NEIGHBORS

SCALING, DIM = 0.25, 16


def layer_of(heads: int, window: int, sinks: int, newest: list[int], retained: list[int]) -> LinearAttention:
    """A layer whose KV heads have these sizes, calibrated on random vectors."""
    tiers = [[(count, 3.0)] for count in newest]
    layer = LinearAttention("none", [0] * heads, DIM, window, sinks, "int8", tiers, retained, DIM)
    generator = torch.Generator().manual_seed(0)
    layer.reset_parameters(generator)
    for coded_tiers in layer.coded_tiers.values():
        for coder in (coded_tiers.key, coded_tiers.value):
            coder.calibrate(Moments.of(torch.randn(coder.heads, 200, DIM, generator=generator)))
    return layer.requires_grad_(False)


def vectors(seed: int, batch: int, heads: int, groups: int, length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    count = heads * groups, heads, heads
    return [torch.randn(batch, n, length, DIM, generator=generator) * 2 for n in count]


def softmax(query, key, value, real=None):
    """Causal attention in float64, and its weights [B, H, L, L]."""
    query, key, value = (x.double() for x in (query, key, value))
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    if real is not None:
        hidden = hidden | ~real[:, None, None]
    share = (query @ key.mT * SCALING).masked_fill(hidden, LOG_ZERO).softmax(-1)
    return share @ value, share


def scores_of(share, window, sinks):
    """The scores of tokens by the weights of queries [B, H, L, L], for each query head [B, H, L]."""
    length = share.shape[-1]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    far = share * (distance >= window) * (torch.arange(length) >= sinks)
    far = far / far.sum(-1, keepdim=True).clamp_min(1e-300)
    decay = (1 - 1 / DECAY) ** torch.arange(length - 1, -1, -1, dtype=torch.float64)[:, None]
    lately = (far.square() * decay * (torch.arange(length) >= length - LATELY)[:, None]).sum(2)
    return (share * (distance >= NEIGHBORS)).square().sum(2) + lately


def tokens_of(layer: LinearAttention, states) -> list[torch.Tensor]:
    """Keys of all slots of each KV head [B, n, d]: sinks, tier and window, free ones as zeros."""
    found = {}
    for n, state in enumerate(states):
        layout = layer.layout_of(n)
        opened = layout.opened(state)
        tier = layout.coded_tiers.unrotate(opened.tiers[-1], 0)
        parts = [
            tier.key.masked_fill(tier.log_weight[..., None] <= LOG_ZERO, 0),
            opened.window.unpacked(torch.float32).key,
        ]
        if opened.sinks is not None:
            parts.insert(0, opened.sinks.unpacked(torch.float32).key)
        for place, head in enumerate(layer.groups[n]):
            found[head] = torch.cat([part[:, place] for part in parts], 1)
    return [found[head] for head in range(len(found))]


def held_positions(layer: LinearAttention, states, key: torch.Tensor) -> list[list[set[int]]]:
    """Of each sequence and KV head, the positions of the tokens that are held, known by their keys."""
    found = []
    for n in range(len(key)):
        found.append([])
        for head, own in enumerate(tokens_of(layer, states)):
            slots = own[n][own[n].abs().sum(-1) > 0]
            found[n].append(set(torch.cdist(slots, key[n, head]).argmin(-1).tolist()))
    return found


SIZES = st.fixed_dictionaries(
    {
        "window": st.sampled_from([1, 5, 40]),
        "sinks": st.sampled_from([0, 2]),
        "newest": st.lists(st.sampled_from([1, 6]), min_size=3, max_size=3),
        "retained": st.lists(st.sampled_from([3, 30, 200]), min_size=3, max_size=3),
    }
)


@given(SIZES, st.integers(2, 180), st.sampled_from([1, 3]), st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_output_is_exact_and_the_tokens_of_highest_score_are_retained(sizes, length, groups, seed):
    layer = layer_of(3, **sizes)
    query, key, value = vectors(seed, 2, 3, groups, length)
    out, states = layer(query, key, value, scaling=SCALING, exact=True)
    right, share = softmax(query, key, value)
    assert (out - right).abs().max() <= 8 * sum_error(length + DIM, float(value.abs().max()) * 20)
    score = scores_of(share, sizes["window"], sizes["sinks"]).unflatten(1, (3, groups)).sum(2)
    for n, heads in enumerate(held_positions(layer, states, key)):
        for head, held in enumerate(heads):
            must = set(range(min(sizes["sinks"], length)))
            must |= set(range(max(0, length - sizes["window"] - sizes["newest"][head]), length))
            assert must <= held
            assert len(held) == min(length, len(must) + sizes["retained"][head])
            free = [x for x in range(length) if x not in must]
            chosen, left = [x for x in free if x in held], [x for x in free if x not in held]
            if chosen and left:
                margin = 1e-4 * float(score[n, head].max() + 1e-9)
                assert score[n, head, chosen].min() >= score[n, head, left].max() - margin


@given(SIZES, st.integers(2, 60), st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_with_room_for_all_the_state_is_that_of_reading_token_by_token(sizes, length, seed):
    sizes = sizes | {"retained": [200, 150, 200]}
    layer = layer_of(3, **sizes)
    inputs = vectors(seed, 2, 3, 2, length)
    states = [layer(*inputs, scaling=SCALING, exact=exact)[1] for exact in (True, False)]
    for n, (exact, streamed) in enumerate(zip(*states, strict=True)):
        exact, streamed = (layer.layout_of(n).opened(state) for state in (exact, streamed))
        for name in ("window", "sinks"):
            for one, other in zip(
                *(vars(getattr(x, name) or streamed.window).values() for x in (exact, streamed)), strict=True
            ):
                assert torch.equal(one, other)
        free = exact.tiers[-1].score < 0
        assert torch.equal(free, streamed.tiers[-1].score < 0)
        for name in ("key", "key_scale", "value", "value_scale"):
            one, other = (getattr(x.tiers[-1], name).masked_fill(free[..., None], 0) for x in (exact, streamed))
            assert torch.equal(one, other)


@given(SIZES, st.lists(st.integers(1, 70), min_size=2, max_size=4), st.integers(0, 100))
@settings(max_examples=25, deadline=None)
def test_later_calls_attend_to_what_is_held_and_to_themselves(sizes, parts, seed):
    """Against float64 attention to the keys and values that the state decodes to."""
    layer, length = layer_of(3, **sizes), sum(parts)
    query, key, value = vectors(seed, 1, 3, 2, length)
    states, start = None, 0
    for part in parts:
        new = slice(start, start + part)
        before = states
        out, states = layer(*(x[:, :, new] for x in (query, key, value)), scaling=SCALING, exact=True, states=states)
        if before is not None and part > 1:
            held = [layer.layout_of(n).opened(state) for n, state in enumerate(before)]
            for n, state in enumerate(held):
                tier = layer.layout_of(n).coded_tiers.unrotate(state.tiers[-1], 0)
                near = [state.window.unpacked(torch.float32)] + (
                    [state.sinks.unpacked(torch.float32)] if state.sinks else []
                )
                for place, head in enumerate(layer.groups[n]):
                    keys = [tier.key[:, place][tier.log_weight[:, place] > LOG_ZERO]]
                    values = [tier.value[:, place][tier.log_weight[:, place] > LOG_ZERO]]
                    for x in near:
                        keys.append(x.key[:, place][x.log_weight > LOG_ZERO])
                        values.append(x.value[:, place][x.log_weight > LOG_ZERO])
                    k = torch.cat([*keys, key[0, head, new]]).double()
                    v = torch.cat([*values, value[0, head, new]]).double()
                    q = query[0, 2 * head : 2 * head + 2, new].double()
                    hidden = torch.ones(part, len(k), dtype=torch.bool).triu(len(k) - part + 1)
                    right = (q @ k.mT * SCALING).masked_fill(hidden, LOG_ZERO).softmax(-1) @ v
                    error = (out[0, 2 * head : 2 * head + 2] - right).abs().max()
                    assert error <= 1e-4 * v.abs().max()
        start += part
    held = held_positions(layer, states, key)[0]
    assert all(set(range(max(0, length - sizes["window"]), length)) <= own for own in held)


@pytest.mark.parametrize("padding", [[0, 7], [30, 1]])
def test_padding_takes_no_slot(padding):
    layer, length = layer_of(2, 5, 2, [6, 1], [3, 30]), 60
    query, key, value = vectors(1, 2, 2, 2, length)
    weight = (torch.arange(length) >= torch.tensor(padding)[:, None]).float()
    out, states = layer(query, key, value, scaling=SCALING, weight=weight, exact=True)
    for n, first in enumerate(padding):
        alone = (x[n : n + 1, :, first:] for x in (query, key, value))
        right, after = layer(*alone, scaling=SCALING, exact=True)
        assert (out[n : n + 1, :, first:] - right).abs().max() <= 1e-5 * value.abs().max()
        assert (out[n, :, :first] == 0).all()
        for group, pair in enumerate(zip(states, after, strict=True)):
            one, other = (layer.layout_of(group).opened(state) for state in pair)
            one = one.map(lambda x, n=n: x[n : n + 1])
            for name in ("window", "sinks"):
                assert all(map(torch.equal, vars(getattr(one, name)).values(), vars(getattr(other, name)).values()))
            *codes, scores = zip(*(vars(x.tiers[-1]).values() for x in (one, other)), strict=True)
            assert all(torch.equal(*pair) for pair in codes)
            assert (scores[0].int() - scores[1]).abs().max() <= 1  # sums of other lengths are rounded otherwise


def test_gradients_and_single_tokens_go_the_other_way():
    layer = layer_of(1, 5, 2, [6], [3])
    query, key, value = vectors(0, 1, 1, 1, 40)
    streamed, _ = layer(query, key, value, scaling=SCALING)
    asked, _ = layer(query.requires_grad_(), key, value, scaling=SCALING, exact=True)
    assert torch.allclose(asked, streamed, atol=1e-4)
    assert asked.requires_grad
