"""Tokens that stay because they draw attention: which ones, the same however a text is cut, and what queries see."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tier_inputs import HEAD, SCALING, VALUE, inputs

from dofla.attention import LOG_ZERO, CodedTiers, Moments, State, attend
from dofla.attention.coding.operations import PLAIN
from dofla.attention.constants import FREE, MOST_SCORE
from dofla.feature_maps import PRF
from dofla.feature_maps.none import NoFeatures

WINDOW, SINKS = 3, 2
TIERS, KEPT = ((4, 4.0), (5, 3.0)), 9


def memory(key, value, heavy_hitters=KEPT, tiers=TIERS):
    coded_tiers = CodedTiers(key.shape[1], HEAD, VALUE, tiers, heavy_hitters)
    for coder, x in ((coded_tiers.key, key), (coded_tiers.value, value)):
        coder.calibrate(Moments.of(x.transpose(0, 1).flatten(1, 2)))
    return coded_tiers


def read(coded_tiers, query, key, value, cuts=(), weight=None, features=None):
    """Outputs and the states after each part of a text cut at ``cuts``."""
    features = features or NoFeatures(key.shape[1], HEAD, 0)
    state, out, states = None, [], []
    for a, b in pairwise(sorted({0, query.shape[2], *(cut for cut in cuts if cut < query.shape[2])})):
        part = None if weight is None else weight[:, a:b]
        options = {"scaling": SCALING, "weight": part, "window": WINDOW, "sinks": SINKS, "coded_tiers": coded_tiers}
        piece, state = attend(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], features, state=state, **options)
        out.append(piece)
        states.append(state)
    return torch.cat(out, 2), states


def same(one: State, other: State) -> bool:
    pairs = zip(one.tiers, other.tiers, strict=True)
    return all(torch.equal(getattr(a, field.name), getattr(b, field.name)) for a, b in pairs for field in fields(a))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    length=st.integers(2, 90),
    cuts=st.lists(st.integers(1, 89), max_size=5),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    left=st.integers(0, 20),
)
def test_the_same_tokens_stay_however_a_text_is_cut(seed, length, cuts, scale, left):
    query, key, value = inputs(seed, 2, 2, 2, length)
    weight = torch.ones(2, length)
    weight[0, : min(left, length - 1)] = 0
    coded_tiers = memory(key, value)
    _, whole = read(coded_tiers, scale * query, key, value, weight=weight)
    _, parts = read(coded_tiers, scale * query, key, value, cuts, weight)
    assert same(whole[-1], parts[-1])


@pytest.mark.parametrize("length", [3, 25, 70, 300])
def test_padding_on_the_left_changes_nothing(length):
    query, key, value = inputs(0, 1, 2, 2, length + 11)
    weight = torch.ones(1, length + 11)
    weight[:, :11] = 0
    coded_tiers = memory(key, value)
    _, padded = read(coded_tiers, query, key, value, weight=weight)
    _, alone = read(coded_tiers, query[:, :, 11:], key[:, :, 11:], value[:, :, 11:])
    last, wanted = padded[-1].tiers[-1], alone[-1].tiers[-1]
    assert torch.equal(last.score, wanted.score)
    there = wanted.score != FREE
    assert torch.equal(last.key[there], wanted.key[there])


def test_queries_see_what_the_state_holds_as_they_ask():
    query, key, value = inputs(0, 2, 2, 2, 60)
    coded_tiers = memory(key, value)
    out, _ = read(coded_tiers, query, key, value)
    _, states = read(coded_tiers, query, key, value, range(1, 60))
    for n in (5, 13, 30, 59):
        near, sinks = states[n].window, states[n].sinks
        tokens = [(x.key, x.value, x.log_weight.unsqueeze(1).expand(-1, 2, -1)) for x in (near, sinks)]
        for tier, coded in enumerate(states[n].tiers):
            held = coded_tiers.unrotate(coded, tier)
            tokens.append(
                (held.key, held.value, held.log_weight.expand(2, 2, -1) if tier else held.log_weight[:, None])
            )
        keys, values = (torch.cat([x[i] for x in tokens], 2).double() for i in (0, 1))
        weights = torch.cat([x[2].expand(-1, 2, -1) for x in tokens], 2).double()
        scores = SCALING * query[:, :, n].double().unflatten(1, (2, 2)) @ keys.mT + weights.unsqueeze(2)
        wanted = (scores.softmax(-1) @ values).flatten(1, 2)
        size = max(key.abs().max().item() * query.abs().max().item() * HEAD * SCALING, 1.0)
        bound = 64 * size * torch.finfo(torch.float32).eps * max(value.abs().max().item(), 1.0)
        assert (out[:, :, n].double() - wanted).abs().max() < bound


def test_what_draws_attention_stays_and_what_does_not_goes():
    query, key, value = inputs(0, 1, 1, 1, 200)
    key[0, 0, 20], key[0, 0, 21] = 3 * query[0, 0, 0], -3 * query[0, 0, 0]
    query = query[:, :, :1] + 0.1 * query  # all ask for what the token in place 20 has
    coded_tiers = memory(key, value)
    _, states = read(coded_tiers, query, key, value)
    held = coded_tiers.unrotate(states[-1].tiers[-1], 1).key[0, 0]
    # A key of three bits a number is off by a few tenths of its size.
    off = [(held - key[0, 0, place]).norm(dim=-1).min() / key[0, 0, place].norm() for place in (20, 21)]
    assert off[0] < 0.4 < off[1]
    assert states[-1].tiers[-1].score.max() == MOST_SCORE or states[-1].tiers[-1].score.argmax() == 0


def test_as_many_leave_as_come_and_go_on_into_the_features():
    query, key, value = inputs(0, 2, 2, 2, 60)
    coded_tiers = memory(key, value)
    features = PRF(2, HEAD, 4)
    features.reset_parameters(torch.Generator().manual_seed(0))
    _, states = read(coded_tiers, query, key, value, (20, 41), features=features)
    last = states[-1].tiers[-1]
    assert len(last) == TIERS[-1][0] + KEPT
    assert (last.log_weight > LOG_ZERO).all()
    assert (last.score > FREE).all()
    assert (states[-1].features.log_mass > LOG_ZERO).all()
    _, together = read(coded_tiers, query, key, value, features=features)
    # Sums of exponentials of the same log-features, in another order.
    bound = 60 * HEAD * torch.finfo(torch.float32).eps
    wanted, found = together[-1].features.log_mass, states[-1].features.log_mass
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound * wanted.abs().max().item())


def test_rows_of_a_batch_are_reordered_whole():
    query, key, value = inputs(0, 3, 2, 1, 40)
    coded_tiers = memory(key, value)
    _, states = read(coded_tiers, query, key, value)
    rotated = states[-1].reorder(torch.tensor([2, 0, 0]))
    for row, source in enumerate((2, 0, 0)):
        one = read(coded_tiers, *(x[source : source + 1] for x in (query, key, value)))[1][-1]
        assert torch.equal(rotated.tiers[-1].score[row], one.tiers[-1].score[0])
        assert torch.equal(rotated.tiers[-1].value[row], one.tiers[-1].value[0])


@pytest.mark.parametrize("heavy_hitters", [0, KEPT])
def test_gradients_pass_through_codes_as_if_nothing_were_rounded(heavy_hitters):
    query, key, value = (x.double() for x in inputs(0, 1, 2, 1, 16))
    coded_tiers = memory(key, value, heavy_hitters, ((6, 5.0), (20, 5.0)))
    asked = [x.clone().requires_grad_() for x in (query, key, value)]
    out, _ = read(coded_tiers, *asked)
    out.square().sum().backward()
    exact = [x.clone().requires_grad_() for x in (query, key, value)]
    scores = (SCALING * exact[0] @ exact[1].mT).masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf)
    (scores.softmax(-1) @ exact[2]).square().sum().backward()
    for found, wanted in zip(asked, exact, strict=True):
        # All tokens are there still, five bits leave .0026 of a variance (levels.distortion), so .05 of a size; twice,
        # for the second tier codes what the first has, in keys and in values.
        assert (found.grad - wanted.grad).norm() < 0.2 * wanted.grad.norm()


def test_what_leaves_kept_tokens_for_the_features_takes_its_own_gradients_along():
    query, key, value = (x.double() for x in inputs(0, 1, 2, 1, 40))
    coded_tiers = memory(key, value)
    features = PRF(2, HEAD, 4)
    features.reset_parameters(torch.Generator().manual_seed(0))
    value.requires_grad_()
    _, states = read(coded_tiers, query, key, value, features=features)
    states[-1].features.mean.sum().backward()
    last = states[-1].tiers[-1]
    codes = coded_tiers.key.encode(key)
    coded = torch.cat(PLAIN.requantize([coded_tiers.key], [codes], 0)[0], -1)  # bytes that no two keys share
    held = (coded.unsqueeze(3) == torch.cat([last.key, last.key_scale], -1).unsqueeze(2)).all(-1).any(-1)
    held[:, :, :SINKS] = held[:, :, -WINDOW - TIERS[0][0] :] = True
    assert held.sum() == 2 * (SINKS + WINDOW + TIERS[0][0] + TIERS[1][0] + KEPT)
    assert ((value.grad.abs().amax(-1) > 0) == ~held).all()
