"""A hybrid student without a plan, and students of which only some layers answer."""

from __future__ import annotations

import pytest
import torch
from families import teacher, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from test_restoring import everything
from torch.testing import assert_close

import dofla
from dofla.errors import DoflaError
from dofla.hybrid import FEATURE_BYTES, HeadCost, split
from dofla.integration.recorder import recording, run_body
from dofla.integration.sites import attention_sites
from dofla.integration.surgery import answering, even_plan, linear_layers, plan_of

quick = settings(max_examples=25, deadline=None, derandomize=True)


@torch.no_grad()
def logits(model, ids):
    return model(ids, use_cache=False)[0]


# --- an even plan -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_is_linearised_without_a_plan_and_generates(family, dtype):
    model, ids = teacher(family).to(dtype), tokens(2, 9)
    assert dofla.linearize(model, budget=16) is model
    plan = plan_of(model)
    cost = HeadCost.of(8, 8, dtype.itemsize)
    assert {(x.features, x.window, x.sinks) for x in plan.layers} == {split(16 * cost.feature, cost)}
    assert {x.feature_map for x in plan.layers} == {"mlp"}
    assert not any(x.keep_softmax for x in plan.layers)
    assert plan.made_by["strategy"] == "hybrid"
    assert plan.made_by["budget"] == 16
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    found = model.generate(ids, **options)
    assert found.shape == (2, 29)
    if dtype == torch.float32:
        assert torch.equal(found, model.generate(ids, use_cache=False, **options))


def test_the_plan_is_that_of_even_plan_and_the_budget_64_by_default():
    model = teacher("llama")
    expected = even_plan(model)
    assert expected.made_by["budget"] == 64
    assert plan_of(dofla.linearize(model)).to_dict() == expected.to_dict()


@quick
@given(budget=st.floats(1, 300), share=st.floats(0, 1), half=st.booleans())
def test_an_even_plan_stays_within_its_budget(budget, share, half):
    model = teacher("llama")
    model = model.bfloat16() if half else model
    plan = even_plan(model, budget, share=share)
    shapes = attention_sites(model).values()
    allowed = sum(budget * x.kv_heads * FEATURE_BYTES * (x.value_dim + 2) for x in shapes)
    assert plan.state_bytes(model.dtype) <= allowed + 1
    assert len({(x.features, x.window, x.sinks) for x in plan.layers}) == 1


def test_layers_that_attend_to_a_window_already_are_left_as_they_are():
    model = teacher("gemma3")
    plan = even_plan(model, 16)
    assert [x.name for x in plan.layers] == [name for name, x in attention_sites(model).items() if not x.linear_time]
    dofla.linearize(model, plan)
    assert list(linear_layers(model)) == [x.name for x in plan.layers]
    assert logits(model, tokens(2, 20)).isfinite().all()


def test_layers_can_be_kept_softmax_by_name():
    model = teacher("llama")
    first, second = attention_sites(model)
    plan = even_plan(model, 16, keep_softmax=[second], feature_map="exponential")
    assert [(x.name, x.keep_softmax) for x in plan.layers] == [(first, False), (second, True)]
    assert plan[first].feature_map == "exponential"
    assert list(linear_layers(dofla.linearize(model, plan))) == [first]


def test_what_no_plan_can_be_made_of_is_one_line_and_changes_nothing():
    model, before = teacher("llama"), everything(teacher("llama"))
    for attempt in (lambda: dofla.linearize(model, budget=0), lambda: even_plan(model, 0.5)):
        with pytest.raises(DoflaError, match=r"budget 0(\.5)? is too small for one feature per layer: give 1 or more"):
            attempt()
    with pytest.raises(DoflaError, match=r"keep_softmax names 'odd', no attention module of this model: it has model"):
        even_plan(model, keep_softmax=["odd"])
    with pytest.raises(DoflaError, match="unknown feature map 'magic'"):
        even_plan(model, feature_map="magic")
    with pytest.raises(DoflaError, match=r"its logits are soft-capped.*keep_softmax"):
        dofla.linearize(teacher("gemma2"))
    assert everything(model) == before


def test_an_even_plan_is_restored_bit_for_bit():
    model, ids = teacher("gpt2"), tokens(2, 20)
    before = logits(model, ids)
    dofla.linearize(model, budget=4)
    assert not torch.equal(logits(model, ids), before)
    dofla.restore(model)
    assert torch.equal(logits(model, ids), before)
    assert everything(model) == everything(teacher("gpt2"))


# --- some layers answering --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_only_the_named_layers_are_linear(family):
    model, ids = dofla.linearize(teacher(family), budget=4), tokens(2, 20)
    names, whole = list(linear_layers(model)), logits(model, ids)
    for chosen in ([], names[:1], names[1:], names):
        plan = even_plan(teacher(family), 4, keep_softmax=[name for name in names if name not in chosen])
        expected = dofla.linearize(teacher(family), plan)
        for name, layer in linear_layers(expected).items():
            layer.load_state_dict(linear_layers(model)[name].state_dict())
        with answering(model, chosen) as same:
            assert same is model
            assert_close(logits(model, ids), logits(expected, ids), rtol=1e-5, atol=1e-5)
        assert torch.equal(logits(model, ids), whole)
    with answering(model, []), torch.no_grad():
        found = logits(model, ids)
        with dofla.softmax(dofla.linearize(teacher(family), budget=4)) as original:
            assert_close(found, logits(original, ids), rtol=1e-5, atol=1e-5)


def test_the_others_come_back_also_after_an_error():
    model, ids = dofla.linearize(teacher("llama"), budget=4), tokens(2, 20)
    before, whole, state = linear_layers(model), logits(model, ids), list(model.state_dict())
    with answering(model, list(before)[:1]):
        assert list(linear_layers(model)) == list(before)[:1]
    with pytest.raises(ZeroDivisionError), answering(model, list(before)[:1]):
        raise ZeroDivisionError
    assert linear_layers(model) == before
    assert list(model.state_dict()) == state
    assert torch.equal(logits(model, ids), whole)
    model.generate(ids, max_new_tokens=3, pad_token_id=0)
    with pytest.raises(DoflaError, match="not linearised"), answering(teacher("llama"), []):
        pass


# --- watching a student -----------------------------------------------------------------------------------------------


def test_a_recorded_student_runs_linear_attention_and_a_recorded_teacher_softmax():
    model, ids, calls = dofla.linearize(teacher("llama"), budget=4), tokens(2, 20), []
    names = list(linear_layers(model))
    with torch.no_grad():
        hidden = {}
        for linear in (False, True):
            with recording(model, names, calls.append, linear=linear):
                hidden[linear] = run_body(model, {"input_ids": ids}).last_hidden_state
        student = run_body(model, {"input_ids": ids}).last_hidden_state
        with dofla.softmax(model):
            theirs = run_body(model, {"input_ids": ids}).last_hidden_state
    assert [call.name for call in calls] == [*names, *names]
    assert torch.equal(hidden[True], student)
    assert_close(hidden[False], theirs, rtol=1e-5, atol=1e-5)
    assert not torch.equal(hidden[True], hidden[False])
