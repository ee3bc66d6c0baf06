"""The plan's bytes are the bytes that generation holds, and a plan survives a person's editor."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from students import keep_softmax

import dofla
from dofla.errors import DoflaError
from dofla.integration.cache import cache_bytes
from dofla.plans.layers import CompressedLayer, FeatureLayer, SoftmaxLayer
from dofla.plans.plan import PREFILLS, Plan

FLOAT = 4


def generated_cache(model, tokens, new_tokens):
    options = {"min_new_tokens": new_tokens, "do_sample": False, "return_dict_in_generate": True}
    with torch.no_grad():
        return model.generate(tokens, max_new_tokens=new_tokens, **options).past_key_values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("token_dtype", ["int8", "model"])
@pytest.mark.parametrize("features", [6, [6, 3]])
@pytest.mark.parametrize(("window", "sinks"), [(5, 0), (0, 2), (5, 2), ([5, 1], 2), ([5, 1], [2, 0]), ([0, 3], [0, 1])])
def test_with_window_or_sinks_the_cache_also_holds_one_weight_per_token_and_group(
    tiny, dtype, token_dtype, features, window, sinks
):
    model = tiny.llama().to(dtype)
    plan = tiny.plan(model, features=features, window=window, sinks=sinks, token_dtype=token_dtype)
    dofla.linear.linearize(model, plan)
    weights = sum(w + s for layer in plan.layers for _, w, s in set(layer.sizes)) * FLOAT
    assert cache_bytes(generated_cache(model, tiny.tokens(1, 4), 6)) == plan.state_bytes(dtype) + weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [{}, {"window": [4, 7], "heavy_hitters": [6, 1]}], ids=str)
def test_the_bytes_of_a_compressed_cache_are_the_plans_beside_log_weights_and_padding(tiny, dtype, sizes):
    model = tiny.llama().to(dtype)
    plan = tiny.compressed_plan(model, **sizes)
    dofla.linear.linearize(model, plan)
    held = cache_bytes(generated_cache(model, tiny.tokens(1, 4), 6))
    groups = [set(layer.sizes) for layer in plan.compressed]
    weights = sum(size.window + size.sinks for own in groups for size in own) * FLOAT
    padding = held - plan.state_bytes(dtype) - weights
    assert 0 <= padding < 16 * 15 * sum(map(len, groups))  # each of the 15 parts begins at a multiple of 16


def test_layers_kept_softmax_cost_what_their_cache_costs_and_so_does_the_teacher(tiny):
    model = tiny.llama()
    plan = tiny.plan(model, features=6, token_dtype="int8")
    cache = generated_cache(model, tiny.tokens(1, 7), 5)
    assert cache_bytes(cache) == plan.softmax_bytes(cache.get_seq_length())
    dofla.linear.linearize(model, keep_softmax(plan, 1))
    cache = generated_cache(model, tiny.tokens(1, 7), 5)
    length = cache.layers[1].get_seq_length()
    assert cache_bytes(cache) == plan.cache_bytes(length)
    assert plan.state_bytes() == plan.layers[0].cache_bytes(length, FLOAT)


def test_bytes_of_layers_by_hand():
    layer = FeatureLayer("a", kv_heads=2, head_dim=6, value_dim=4, features=[3, 5], window=7, sinks=2)
    assert layer.features_per_head == [3, 5]
    assert layer.sizes == [(3, 7, 2), (5, 7, 2)]
    assert layer.cache_bytes(9, 4) == 8 * 6 * 4 + 18 * 10 * 4
    plan = Plan([layer, SoftmaxLayer("b", 2, 6, 4)])
    assert plan.state_bytes() == (48 + 180) * 4
    assert plan.state_bytes(torch.bfloat16) == 48 * 4 + 180 * 2
    assert plan.softmax_bytes(10) == 2 * 10 * 2 * (6 + 4) * 4
    assert plan.cache_bytes(10, torch.float16) == plan.state_bytes(torch.float16) + 10 * 2 * (6 + 4) * 2
    # Of a token in int8, a byte a number and one for each power of two, whatever the model's dtype.
    ragged = FeatureLayer("a", 2, 6, 4, features=3, window=[7, 1], sinks=[0, 2], token_dtype="int8")
    assert ragged.sizes == [(3, 7, 0), (3, 1, 2)]
    assert ragged.cache_bytes(9, 4) == ragged.cache_bytes(9, 2) == 2 * 3 * 6 * 4 + (7 + 3) * (6 + 4 + 2)
    alone = FeatureLayer("a", 2, 8, 8, window=[3, 0], sinks=[0, 1], feature_map="none")
    assert alone.sizes == [(0, 3, 0), (0, 0, 1)]


@pytest.mark.parametrize(("bits", "token"), [(4.0, 16 + 2 + 32 + 4 + 2), (2.5, 10 + 2 + 20 + 4 + 2)])
def test_bytes_of_a_compressed_layer_by_hand(bits, token):
    """Blocks of 16 numbers: 2 of a key, 4 of a value, each with a byte of scale; 2.5 bits are 5 and 10 of those. And a
    score."""
    layer = CompressedLayer("a", 2, 32, 64, window=2, sinks=1, newest=[7, 5], heavy_hitters=[9, 1], bits=bits)
    assert layer.slots == [19, 9]
    assert layer.cache_bytes(9, 4) == layer.cache_bytes(9, 2) == 2 * 3 * 98 + (16 + 6) * token
    grows = CompressedLayer("a", 2, 32, 64, window=2, sinks=1, newest=[7, 1], heavy_hitters=[9, 0], bits=bits)
    assert grows.slots == [19, math.inf]
    assert grows.ranges[f"{bits:g}-bit"] == "16-all"
    assert [grows.cache_bytes(n, 4) - 2 * 3 * 98 for n in (0, 3, 13)] == [16 * token, 16 * token, (16 + 10) * token]


@st.composite
def layer_plans(draw):
    kv_heads, kind = draw(st.integers(1, 4)), draw(st.sampled_from([SoftmaxLayer, CompressedLayer, FeatureLayer]))

    def count(least, most):
        one = st.integers(least, most)
        return draw(one | st.lists(one, min_size=kv_heads, max_size=kv_heads))

    dims = st.integers(1, 16).map(lambda n: 8 * n)
    shape = draw(st.text(min_size=1, max_size=8)), kv_heads, draw(dims), draw(dims)
    if kind is SoftmaxLayer:
        return kind(*shape)
    exact = {"window": count(1, 64), "sinks": count(0, 8)}
    if kind is CompressedLayer:
        bits = draw(st.sampled_from([1.0, 2.5, 3.0, 5]))
        return kind(*shape, **exact, newest=count(1, 20), heavy_hitters=count(1, 20), bits=bits)
    others = {"token_dtype": draw(st.sampled_from(["int8", "model"])), "smooth_keys": draw(st.booleans())}
    return kind(*shape, features=count(1, 300), **exact, **others)


@settings(max_examples=25, derandomize=True)
@given(
    layers=st.lists(layer_plans(), min_size=1, max_size=5, unique_by=lambda x: x.name),
    model=st.text(max_size=5),
    made_by=st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text(max_size=5))),
    context=st.none() | st.integers(min_value=1),
    prefill=st.sampled_from(PREFILLS),
)
def test_a_plan_round_trips_through_json(layers, model, made_by, context, prefill):
    plan = Plan(layers, model, made_by, context, prefill)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_a_plan_round_trips_through_a_file_or_its_folder(tmp_path):
    plan = Plan([FeatureLayer("a", 2, 8, 8, [4, 3], window=2)], "model", {"strategy": "dof", "lambda": 0.1})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.load(str(tmp_path)) == plan
    (tmp_path / "plan.json").unlink()
    with pytest.raises(DoflaError, match=r"plan\.json does not exist: it should hold a plan"):
        Plan.load(tmp_path)


def test_a_plan_that_says_nothing_of_how_tokens_are_kept_keeps_them_in_the_models_dtype():
    data = Plan([FeatureLayer("a", 2, 8, 8, 4, window=3, token_dtype="int8")]).to_dict()
    del data["layers"]["a"]["token_dtype"]
    assert Plan.from_dict(data)["a"].token_dtype == "model"


def test_a_plan_edited_by_hand_is_what_the_model_becomes(tiny, tmp_path):
    model = tiny.llama()
    path = tmp_path / "plan.json"
    tiny.plan(model).save(path)
    data = json.loads(path.read_text())
    first, second = data["layers"].values()
    first |= {"features": [3, 9], "window": 4, "sinks": [2, 0], "token_dtype": "int8"}
    second["kind"] = "softmax"
    for name in second.keys() - {"kind", "kv_heads", "head_dim", "value_dim"}:
        del second[name]
    del data["made_by"], data["model"]
    path.write_text(json.dumps(data))

    plan = Plan.load(path)
    dofla.linear.linearize(model, plan)
    first, second = (layer.self_attn for layer in model.model.layers)
    found = [(group.features, group.window, group.sinks, group.int8) for group in first.dofla.groups]
    assert found == [(3, 4, 2, True), (9, 4, 0, True)]
    assert not hasattr(second, "dofla")
    assert plan["model.layers.1.self_attn"].kind == "softmax"
    with pytest.raises(KeyError):
        plan["model.layers.2.self_attn"]


FEATURES = [
    ({"features": 0}, "features is 0"),
    ({"features": 4.0}, "features is 4.0"),
    ({"features": True}, "features is True"),
    ({"features": [4]}, "features has 1 numbers for 2 KV heads: give one each, or an int"),
    ({"features": [4, 0]}, r"features is \[4, 0\]"),
    ({"window": -1}, "window is -1: every KV head needs an integer, 0 or more"),
    ({"window": [3, 3, 3]}, "window has 3 numbers for 2 KV heads"),
    ({"window": {"first": 3}}, "window is {'first': 3}"),
    ({"sinks": [2, None]}, r"sinks is \[2, None\]"),
    ({"token_dtype": "int4"}, "token_dtype is 'int4': choose one of int8, model"),
    ({"token_dtype": ["int8", "model"]}, r"token_dtype is \['int8', 'model'\]"),
    ({"feature_map": "none", "window": [3, 0]}, "feature_map 'none' requires window > 0 or sinks > 0"),
    ({"sinks": "many"}, "sinks is 'many'"),
    ({"feature_map": "magic"}, "unknown feature map 'magic': choose one of .*prf"),
    ({"feature_map": ["prf"]}, "wrong fields"),
    ({"kv_heads": 0}, "kv_heads is 0"),
    ({"value_dim": None}, "value_dim is None"),
    ({"smooth_keys": "no"}, "smooth_keys is 'no': give true or false"),
    ({"color": "red"}, "unknown field 'color': choose from feature_map, features, "),
    ({"kind": "magic"}, "kind is 'magic': choose one of softmax, compressed, features"),
]
COMPRESSED = [
    ({"window": 0}, "window is 0: every KV head needs an integer, 1 or more"),
    ({"heavy_hitters": [3, -1]}, r"heavy_hitters is \[3, -1\]"),
    ({"heavy_hitters": [3]}, "heavy_hitters has 1 numbers for 2 KV heads"),
    ({"sinks": -1}, "sinks is -1"),
    ({"bits": 0.5}, "bits is 0.5: give 1 to 5"),
    ({"bits": "3"}, "bits is '3'"),
    ({"head_dim": 12}, "heads have 12 and 8 numbers: a compressed cache needs multiples of 8"),
    ({"features": 3}, "unknown field 'features'"),
]


@pytest.mark.parametrize(
    ("layer", "edit", "message"),
    [*(("second.attention", *case) for case in FEATURES), *(("compressed", *case) for case in COMPRESSED)],
)
def test_a_field_that_is_off_is_one_line_naming_file_layer_and_field(tmp_path, layer, edit, message):
    plan = Plan([FeatureLayer(f"{name}.attention", 2, 8, 8, 4) for name in ("first", "second")])
    plan.layers.append(CompressedLayer("compressed", 2, 8, 8, 4, 2, 5, 6))
    data = plan.to_dict()
    data["layers"][layer] |= edit
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(DoflaError, match=f"{path}: .*layer {layer}.*{message}"):
        Plan.load(path)
    with pytest.raises(DoflaError, match=f"the plan: layer {layer}:? .*{message}"):
        Plan.from_dict(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("layers"), "has no layers"),
        (lambda data: data.update(layers={}), "has no layers"),
        (lambda data: data.update(layers=[1]), "has no layers"),
        (lambda data: data.update(layers={"a": 5}), "layer a: kind is 5"),
        (lambda data: data.update(layers={"a": {"kind": "softmax"}}), "layer a has wrong fields: .*head_dim"),
        (lambda data: data.update(made_by="me"), "made_by is 'me'"),
        (lambda data: data.update(context=0), "context is 0: give a number of tokens"),
        (lambda data: data.update(context=True), "context is True"),
        (lambda data: data.update(context="512"), "context is '512'"),
        (lambda data: data.update(prefill="stream"), "prefill is 'stream': choose one of exact, sequential"),
    ],
)
def test_a_plan_of_another_form_is_one_line_naming_the_file(tmp_path, change, message):
    data = Plan([FeatureLayer("a", 2, 8, 8, 4)]).to_dict()
    change(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(DoflaError, match=f"{path}.*{message}"):
        Plan.load(path)


def test_a_plan_of_an_older_format_is_to_be_made_again(tiny):
    data = tiny.plan(tiny.llama(), features=4).to_dict()
    assert data["format"] == 4
    Plan.from_dict(data)
    for older in (1, 2, 3):
        with pytest.raises(DoflaError, match="the plan was made by another version of dofla: compress the model again"):
            Plan.from_dict(data | {"format": older})
    del data["format"]
    Plan.from_dict(data)  # written by hand


def test_layers_with_equal_caches_stand_in_one_row():
    def layer(name, window):
        return CompressedLayer(name, 2, 32, 32, window, 2, 10, [10, 31])

    names = [f"model.layers.{n}.self_attn" for n in range(40)]
    plan = Plan([layer(name, [6, 12] if n % 8 == 3 else 9) for n, name in enumerate(names)])
    plan.made_by["held_out"] = {"measured": 0.0372, "even": 0.0351}
    lines = str(plan).splitlines()
    assert [line.split() for line in lines[1:-3]] == [
        ["model.layers.*.self_attn", "0-2,", "4-10,", "12-18,", "20-26,", "9", "2", "20-41"],
        ["28-34,", "36-39"],
        ["model.layers.*.self_attn", "3,", "11,", "19,", "27,", "35", "6-12", "2", "20-41"],
    ]
    assert max(map(len, lines)) <= 80
    assert "features" not in str(plan)
    assert "float32" not in str(plan)
    assert lines[-1] == "KL on held-out windows: 0.037 measured, 0.035 even (kept)"
    odd = Plan([layer(name, 9) for name in ("first", "blocks.0.attn.1", "blocks.0.attn.2")])
    assert [line.split()[0] for line in str(odd).splitlines()[1:4]] == [x.name for x in odd.layers]


def test_prompts_of_plans_of_earlier_versions_are_read_exactly():
    data = Plan([SoftmaxLayer("b", 2, 6, 4)]).to_dict()
    assert Plan.from_dict(data | {"prefill": "auto"}) == Plan.from_dict(data)
