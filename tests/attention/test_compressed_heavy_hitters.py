"""Kept tokens by the kernels: the same stay, with the same scores, as in plain torch, and queries see the same."""

from __future__ import annotations

import pytest
import torch
from coded_layers import SCALING, assert_same_codes, error_of, layer_of, run, vectors
from forms import needs_kernels, padding, threads
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.attention import Coder
from dofla.attention.constants import FREE

TIERS = [((6, 4.0), (9, 3.0)), ((12, 2.5),)]
SIZES = {"head_dim": 32, "value_dim": 16, "window": 4, "sinks": 2, "features": 0, "heavy_hitters": 40}


def layer(seed=0, **other):
    return layer_of(seed, **{"tiers": [TIERS[0]] * 2, **SIZES, **other})


@needs_kernels
@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    head_dim=st.sampled_from([8, 24, 64, 128]),
    tiers=st.sampled_from(TIERS),
    heavy_hitters=st.sampled_from([1, 17, 100]),
    features=st.sampled_from([0, 4]),
    scale=st.sampled_from([0.0, 0.1, 1.0, 30.0]),
    groups=st.integers(1, 5),
    length=st.integers(2, 300),
    cuts=st.lists(st.integers(1, 299), max_size=4),
    kind=st.sampled_from(["none", "left", "any"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    count=st.sampled_from([1, 2]),
)
def test_the_same_tokens_stay_with_the_scores_of_plain_torch(
    seed, head_dim, tiers, heavy_hitters, features, scale, groups, length, cuts, kind, dtype, count
):
    student = layer(seed, head_dim=head_dim, tiers=[tiers] * 2, heavy_hitters=heavy_hitters, features=features)
    query, key, value = vectors(seed, student, 2, groups, length, dtype)
    inputs, weight = (scale * query, key, value), padding(kind, 2, length, torch.Generator().manual_seed(seed))
    cuts = sorted({0, length - 1, length, *(cut for cut in cuts if cut < length)})
    with threads(count):
        out, states, calls = run(student, inputs, weight, cuts)
    wanted, plain, _ = run(student, inputs, weight, cuts, kernels=False)
    assert "attend_and_code" in calls.names
    assert features or calls.alone
    assert_same_codes(states, plain)
    seen = torch.ones(2, length, dtype=torch.bool) if weight is None else weight > 0
    bound = 2 * error_of(student, *inputs)  # either way
    assert ((out.float() - wanted.float()).abs() * seen[:, None, :, None]).max() < bound


@needs_kernels
@pytest.mark.parametrize("length", [1, 70])
def test_states_that_are_views_or_reordered_go_on_the_same(length):
    student = layer()
    _, states, _ = run(student, vectors(0, student, 3, 2, 100), None, [0, 100])
    inputs, before = vectors(1, student, 3, 2, length), states[0]
    copies = [state.copy() for state in before]
    out, after = student(*inputs, scaling=SCALING, states=before)
    assert_same_codes([before], [copies])
    strided = [state.map(lambda t: t.repeat_interleave(2, 1)[:, ::2]) for state in before]
    assert_same_codes([student(*inputs, scaling=SCALING, states=strided)[1]], [after])
    order = torch.tensor([2, 0, 0])
    rotated = [state.reorder(order) for state in before]
    assert torch.equal(student(*(x[order] for x in inputs), scaling=SCALING, states=rotated)[0], out[order])


@needs_kernels
def test_a_state_that_keeps_fewer_tokens_is_refused():
    student, fewer = layer(), layer(heavy_hitters=SIZES["heavy_hitters"] - 1)
    _, ((state,),), _ = run(fewer, vectors(0, fewer, 1, 2, 80), None, [0, 80])
    with pytest.raises(RuntimeError, match="the state is another layer's"):
        student(*vectors(1, student, 1, 2, 1), scaling=SCALING, states=[state])


@needs_kernels
def test_padding_draws_nothing():
    student = layer()
    inputs, weight = vectors(0, student, 1, 2, 90), torch.ones(1, 90)
    weight[:, 60:] = 0
    _, ((before,), (after,)), calls = run(student, inputs, weight, [0, 60, 90])
    assert calls.alone
    # What went is the oldest of the least, in order; those that stay have the scores they had.
    old, new = (student.layout_of(0).opened(state).tiers[-1].score[0] for state in (before, after))
    for head in range(2):
        drawn = new[head][new[head] != FREE].tolist()
        rest = iter(old[head].tolist())
        assert drawn
        assert all(score in rest for score in drawn)


@pytest.mark.parametrize("inference", [False, True])
def test_queries_are_turned_by_what_back_is_now(inference):
    with torch.inference_mode(inference):
        coder = Coder(2, 16, [3.0])
        coder.reset()
        query = torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(0))
        numbers, unit = coder.rotate_query_integer(query)
        coder.back.mul_(2)
        again, twice = coder.rotate_query_integer(query)
        assert torch.equal(again, numbers)
        assert torch.equal(twice, 2 * unit)
        coder.constants = coder.constants.clone()
        coder.back.mul_(4)
        assert torch.equal(coder.rotate_query_integer(query)[1], 8 * unit)
