"""A hybrid student without a plan, and students of which only some heads answer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from students import everything, keep_softmax
from tiny_families import POSITIONS, plan_for, teacher, tokens
from torch.testing import assert_close

import dofla
from dofla.errors import DoflaError
from dofla.feature_maps.cost import FEATURE_BYTES, HeadCost
from dofla.integration.converted import Converted
from dofla.integration.recorder import recording, run_body
from dofla.integration.sites import attention_sites
from dofla.integration.surgery import answering, even_plan
from dofla.plans.hybrid import split
from dofla.plans.layers import FeatureLayer, SoftmaxLayer

quick = settings(max_examples=25, derandomize=True)


@torch.no_grad()
def logits(model, ids):
    return model(ids, use_cache=False)[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_is_linearized_without_a_plan_and_generates(family, dtype):
    model, ids = teacher(family).to(dtype), tokens(2, 9)
    assert dofla.linear.linearize(model, budget=16) is model
    plan = Converted.of(model).plan
    cost = HeadCost.of(8, 8, dtype.itemsize, "int8")
    assert {(x.features, x.window, x.sinks) for x in plan.layers} == {split(16 * cost.feature, cost)}
    assert {x.token_dtype for x in plan.layers} == {"int8"}
    assert {x.feature_map for x in plan.layers} == {"mlp"}
    assert not any(isinstance(x, SoftmaxLayer) for x in plan.layers)
    assert plan.made_by["strategy"] == "hybrid"
    assert plan.made_by["budget"] == 16
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    found = model.generate(ids, **options)
    assert found.shape == (2, 29)
    if dtype == torch.float64:  # in others, a step of the eight bits may make the difference
        assert torch.equal(found, model.generate(ids, use_cache=False, **options))


def test_the_plan_is_that_of_even_plan_and_the_budget_64_by_default():
    model = teacher("llama")
    expected = even_plan(model)
    assert expected.made_by["budget"] == 64
    assert Converted.of(dofla.linear.linearize(model)).plan.to_dict() == expected.to_dict()


@quick
@given(
    budget=st.floats(1, 300),
    share=st.floats(0, 1),
    half=st.booleans(),
    token_dtype=st.sampled_from([None, "int8", "model"]),
)
def test_an_even_plan_stays_within_its_budget(budget, share, half, token_dtype):
    model = teacher("llama")
    model = model.bfloat16() if half else model
    plan = even_plan(model, budget, share=share, token_dtype=token_dtype)
    assert {x.token_dtype for x in plan.layers} == {token_dtype or "int8"}
    shapes = attention_sites(model).values()
    allowed = sum(budget * x.kv_heads * FEATURE_BYTES * (x.value_dim + 2) for x in shapes)
    assert plan.state_bytes(model.dtype) <= allowed + 1
    assert len({(x.features, x.window, x.sinks) for x in plan.layers}) == 1


def test_an_encoder_keeps_its_tokens_as_they_are_unless_told():
    for token_dtype in (None, "model", "int8"):
        plan = even_plan(teacher("bert"), 16, token_dtype=token_dtype)
        assert {x.token_dtype for x in plan.layers} == {token_dtype or "model"}
    # In an encoder-decoder, each side does what it does alone.
    crossing = [name for name in attention_sites(teacher("bart")) if "encoder_attn" in name]
    plan = even_plan(teacher("bart"), 16, keep_softmax=crossing)
    kept_as = {x.name: x.token_dtype for x in plan.converted}
    assert kept_as
    assert all(kept == ("int8" if "decoder" in name else "model") for name, kept in kept_as.items())


def test_layers_that_attend_to_a_window_already_are_left_as_they_are():
    model = teacher("gemma3")
    plan = even_plan(model, 16)
    assert [x.name for x in plan.layers] == [name for name, x in attention_sites(model).items() if not x.linear_time]
    dofla.linear.linearize(model, plan)
    assert list(Converted.of(model).layers) == [x.name for x in plan.layers]
    assert logits(model, tokens(2, 20)).isfinite().all()


def test_layers_can_be_kept_softmax_by_name():
    model = teacher("llama")
    first, second = attention_sites(model)
    plan = even_plan(model, 16, keep_softmax=[second], feature_map="exponential")
    assert [(x.name, type(x)) for x in plan.layers] == [(first, FeatureLayer), (second, SoftmaxLayer)]
    assert plan[first].feature_map == "exponential"
    assert list(Converted.of(dofla.linear.linearize(model, plan)).layers) == [first]


def test_what_no_plan_can_be_made_of_is_one_line_and_changes_nothing():
    model, before = teacher("llama"), everything(teacher("llama"))
    with pytest.raises(DoflaError, match="budget is '64': give a number"):
        dofla.linear.linearize(model, budget="64")
    for attempt in (lambda: dofla.linear.linearize(model, budget=0), lambda: even_plan(model, 0.5)):
        with pytest.raises(DoflaError, match=r"budget 0(\.5)? is too small for one feature per layer: give 1 or more"):
            attempt()
    with pytest.raises(DoflaError, match=r"keep_softmax names 'odd', no attention module of this model: it has model"):
        even_plan(model, keep_softmax=["odd"])
    with pytest.raises(DoflaError, match="unknown feature map 'magic'"):
        even_plan(model, feature_map="magic")
    with pytest.raises(DoflaError, match=r"its logits are soft-capped.*keep_softmax"):
        dofla.linear.linearize(teacher("gemma2"))
    assert everything(model) == before


def all_heads(model):
    return {name: range(layer.kv_heads) for name, layer in Converted.of(model).layers.items()}


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_only_the_named_layers_are_linear(family):
    model, ids = dofla.linear.linearize(teacher(family), budget=4), tokens(2, 20)
    names, whole = list(Converted.of(model).layers), logits(model, ids)
    for chosen in ([], names[:1], names[1:], names):
        plan = even_plan(teacher(family), 4)
        for n, own in enumerate(plan.layers):
            if own.name not in chosen:
                keep_softmax(plan, n)
        expected = dofla.linear.linearize(teacher(family), plan)
        for name, layer in Converted.of(expected).layers.items():
            layer.load_state_dict(Converted.of(model).layers[name].state_dict())
        with answering(model, {name: all_heads(model)[name] for name in chosen}) as same:
            assert same is model
            assert_close(logits(model, ids), logits(expected, ids), rtol=1e-5, atol=1e-5)
        assert torch.equal(logits(model, ids), whole)
    for nobody in ({}, {names[0]: []}):
        with answering(model, nobody), torch.no_grad():
            found = logits(model, ids)
            with dofla.original(dofla.linear.linearize(teacher(family), budget=4)) as original:
                assert_close(found, logits(original, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "heads"), [("llama", [0]), ("llama", [1]), ("llama", [0, 1]), ("gpt2", [0, 3]), ("gpt2", [1, 2, 3])]
)
def test_only_the_named_heads_are_linear_under_padding_as_well(family, heads):
    """As a student whose other heads see all tokens exactly."""
    plan = plan_for(teacher(family), "ragged")
    for layer in plan.layers:
        layer.window = [own if head in heads else POSITIONS for head, own in enumerate(layer.window)]
    expected, model = (dofla.linear.linearize(teacher(family), x) for x in (plan, plan_for(teacher(family), "ragged")))
    for name, layer in Converted.of(expected).layers.items():
        own = Converted.of(model).layers[name]
        assert [x.heads for x in own.groups] == [x.heads for x in layer.groups]
        assert len(own.groups) > 1
        layer.load_state_dict(own.state_dict())
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :7] = 0
    with answering(model, dict.fromkeys(Converted.of(model).layers, heads)), torch.no_grad():
        found = model(ids, attention_mask=mask, use_cache=False).logits
    with torch.no_grad():
        wanted = expected(ids, attention_mask=mask, use_cache=False).logits
    assert_close(found[mask.bool()], wanted[mask.bool()], rtol=1e-4, atol=1e-4)


def test_the_others_come_back_also_after_an_error():
    model, ids = dofla.linear.linearize(teacher("llama"), budget=4), tokens(2, 20)
    before, whole, state = Converted.of(model).layers, logits(model, ids), list(model.state_dict())
    everything_before = everything(model)
    with answering(model, {next(iter(before)): [0]}):
        assert Converted.of(model).layers == before
        assert list(model.state_dict()) == state
    with pytest.raises(ZeroDivisionError), answering(model, {next(iter(before)): [0]}):
        raise ZeroDivisionError
    assert Converted.of(model).layers == before
    assert everything(model) == everything_before
    assert torch.equal(logits(model, ids), whole)
    model.generate(ids, max_new_tokens=3, pad_token_id=0)
    with pytest.raises(DoflaError, match="not converted"), answering(teacher("llama"), {}):
        pass


def test_a_recorded_student_runs_softmax():
    model, ids, calls = dofla.linear.linearize(teacher("llama"), budget=4), tokens(2, 20), []
    names = list(Converted.of(model).layers)
    with torch.no_grad():
        with recording(model, names, calls.append):
            hidden = run_body(model, {"input_ids": ids}).last_hidden_state
        student = run_body(model, {"input_ids": ids}).last_hidden_state
        with dofla.original(model):
            theirs = run_body(model, {"input_ids": ids}).last_hidden_state
    assert [call.name for call in calls] == names
    assert_close(hidden, theirs, rtol=1e-5, atol=1e-5)
    assert not torch.equal(hidden, student)
