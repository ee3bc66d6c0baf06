"""The plan's bytes are the bytes that generation holds, and a plan survives a person's editor."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dofla
from dofla.errors import DoflaError
from dofla.integration.cache import cache_bytes
from dofla.plan import LayerPlan, Plan

FLOAT = 4


def generated_cache(model, tokens, new_tokens):
    options = {"min_new_tokens": new_tokens, "do_sample": False, "return_dict_in_generate": True}
    with torch.no_grad():
        return model.generate(tokens, max_new_tokens=new_tokens, **options).past_key_values


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("new_tokens", [2, 9])
def test_without_window_and_sinks_state_bytes_are_the_bytes_of_the_cache(tiny, kind, dtype, new_tokens):
    model = getattr(tiny, kind)().to(dtype)
    plan = tiny.plan(model, features=11)
    dofla.linearize(model, plan)
    assert cache_bytes(generated_cache(model, tiny.tokens(1, 7), new_tokens)) == plan.state_bytes(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [6, [6, 3]])
@pytest.mark.parametrize(("window", "sinks"), [(5, 0), (0, 2), (5, 2)])
def test_with_window_or_sinks_the_cache_also_holds_one_weight_per_token_and_group(tiny, dtype, features, window, sinks):
    model = tiny.llama().to(dtype)
    plan = tiny.plan(model, features=features, window=window, sinks=sinks)
    dofla.linearize(model, plan)
    groups = len({features} if isinstance(features, int) else set(features))
    weights = len(plan.layers) * groups * (window + sinks) * FLOAT
    assert cache_bytes(generated_cache(model, tiny.tokens(1, 4), 6)) == plan.state_bytes(dtype) + weights


def test_every_sequence_of_a_batch_has_a_state_of_its_own(tiny):
    model = tiny.llama()
    plan = tiny.plan(model, features=[5, 2])
    dofla.linearize(model, plan)
    assert cache_bytes(generated_cache(model, tiny.tokens(3, 7), 4)) == 3 * plan.state_bytes()


def test_layers_kept_softmax_cost_what_their_cache_costs(tiny):
    model = tiny.llama()
    plan = tiny.plan(model, features=6)
    plan.layers[1].keep_softmax = True
    dofla.linearize(model, plan)
    cache = generated_cache(model, tiny.tokens(1, 7), 5)
    length = cache.layers[1].get_seq_length()
    assert cache_bytes(cache) == plan.state_bytes() + plan.kept_softmax_bytes(length)
    assert plan.state_bytes() == plan.layers[0].feature_numbers * FLOAT


def test_softmax_bytes_are_the_bytes_of_the_teachers_cache(tiny):
    model = tiny.llama()
    plan = tiny.plan(model)
    cache = generated_cache(model, tiny.tokens(1, 7), 5)
    assert cache_bytes(cache) == plan.softmax_bytes(cache.get_seq_length())


def test_numbers_of_a_layer_by_hand():
    layer = LayerPlan("a", kv_heads=2, head_dim=6, value_dim=4, features=[3, 5], window=7, sinks=2)
    assert layer.features_per_head == [3, 5]
    assert layer.feature_numbers == 3 * 6 + 5 * 6
    assert layer.token_numbers == 9 * 2 * (6 + 4)
    plan = Plan([layer, LayerPlan("b", 2, 6, 4, keep_softmax=True)])
    assert plan.state_bytes() == (48 + 180) * 4
    assert plan.state_bytes(torch.bfloat16) == 48 * 4 + 180 * 2
    assert plan.softmax_bytes(10) == 2 * 10 * 2 * (6 + 4) * 4
    assert plan.kept_softmax_bytes(10, torch.float16) == 10 * 2 * (6 + 4) * 2


@st.composite
def layer_plans(draw):
    kv_heads = draw(st.integers(1, 4))
    count = st.integers(1, 300)
    return LayerPlan(
        name=draw(st.text(min_size=1, max_size=8)),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 128)),
        value_dim=draw(st.integers(1, 128)),
        features=draw(st.one_of(count, st.lists(count, min_size=kv_heads, max_size=kv_heads))),
        window=draw(st.integers(0, 64)),
        sinks=draw(st.integers(0, 8)),
        keep_softmax=draw(st.booleans()),
    )


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    layers=st.lists(layer_plans(), min_size=1, max_size=5, unique_by=lambda x: x.name),
    model=st.text(max_size=5),
    made_by=st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text(max_size=5))),
)
def test_a_plan_round_trips_through_json(layers, model, made_by):
    plan = Plan(layers, model, made_by)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_a_plan_round_trips_through_a_file_or_its_folder(tmp_path):
    plan = Plan([LayerPlan("a", 2, 8, 8, [4, 3], window=2)], "model", {"strategy": "dof", "lambda": 0.1})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.load(str(tmp_path)) == plan


def test_a_plan_edited_by_hand_is_what_the_model_becomes(tiny, tmp_path):
    model = tiny.llama()
    path = tmp_path / "plan.json"
    tiny.plan(model).save(path)
    data = json.loads(path.read_text())
    first, second = data["layers"].values()
    first |= {"features": [3, 9], "window": 4}
    second["keep_softmax"] = True
    del second["features"], data["made_by"], data["model"]
    path.write_text(json.dumps(data))

    plan = Plan.load(path)
    dofla.linearize(model, plan)
    first, second = (layer.self_attn for layer in model.model.layers)
    assert first.dofla.features == [3, 9]
    assert first.dofla.window == 4
    assert not hasattr(second, "dofla")
    assert plan["model.layers.1.self_attn"].keep_softmax
    with pytest.raises(KeyError):
        plan["model.layers.2.self_attn"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"features": 0}, "features is 0"),
        ({"features": -3}, "features is -3"),
        ({"features": 4.0}, "features is 4.0"),
        ({"features": "8"}, "features is '8'"),
        ({"features": None}, "features is None"),
        ({"features": True}, "features is True"),
        ({"features": [4]}, "1 feature numbers for 2 KV heads"),
        ({"features": [4, 0]}, r"features is \[4, 0\]"),
        ({"features": []}, "0 feature numbers for 2 KV heads"),
        ({"window": -1}, "window is -1"),
        ({"window": 2.5}, "window is 2.5"),
        ({"sinks": "many"}, "sinks is 'many'"),
        ({"feature_map": "magic"}, "unknown feature map 'magic': choose one of .*prf"),
        ({"feature_map": ["prf"]}, "wrong fields"),
        ({"kv_heads": 0}, "kv_heads is 0"),
        ({"head_dim": "8"}, "head_dim is '8'"),
        ({"value_dim": None}, "value_dim is None"),
        ({"keep_softmax": "no"}, "keep_softmax is 'no'"),
        ({"colour": "red"}, "colour"),
        ({"name": "other"}, "wrong fields"),
    ],
)
def test_a_field_that_is_off_is_one_line_naming_file_layer_and_field(tmp_path, edit, message):
    plan = Plan([LayerPlan("first.attention", 2, 8, 8, 4), LayerPlan("second.attention", 2, 8, 8, 4)])
    data = plan.to_dict()
    data["layers"]["second.attention"] |= edit
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(DoflaError, match=message) as error:
        Plan.load(path)
    assert "layer second.attention" in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("layers"), "has no layers"),
        (lambda data: data.update(layers={}), "has no layers"),
        (lambda data: data.update(layers=[1]), "has no layers"),
        (lambda data: data.update(layers={"a": 5}), "layer a has wrong fields"),
        (lambda data: data.update(layers={"a": {"kv_heads": 1}}), "layer a has wrong fields: .*head_dim"),
        (lambda data: data.update(made_by="me"), "made_by is 'me'"),
    ],
)
def test_a_plan_of_another_form_is_one_line_naming_the_file(tmp_path, change, message):
    data = Plan([LayerPlan("a", 2, 8, 8, 4)]).to_dict()
    change(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(DoflaError, match=message) as error:
        Plan.load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_plan_is_one_line(tmp_path):
    with pytest.raises(DoflaError, match=r"plan\.json does not exist: it should hold a plan"):
        Plan.load(tmp_path)
