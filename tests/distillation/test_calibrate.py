"""What maps that start from data make of a first batch: statistics and level against loops over the recorded calls."""

import math

import pytest
import torch
from stopping import base_weights, equal
from torch.testing import assert_close

import dofla
from dofla.attention import rounded
from dofla.distillation import distill
from dofla.distillation.calibrate import calibrate
from dofla.distillation.steps import generator_of
from dofla.integration.converted import Converted
from dofla.integration.recorder import recording, run_body

LENGTH = 14
RAGGED, EVEN = [5, 3], 4
OPTIONS = {"steps": 4, "batch_size": 2, "rows": 9}
both_maps = pytest.mark.parametrize("name", ["exponential", "mlp"])


def student_of(tiny, family="llama", name="mlp", features=RAGGED, seed=0, **sizes):
    model = getattr(tiny, family)()
    kv_heads = 2 if family == "llama" else 4
    features = [features[head % 2] for head in range(kv_heads)] if isinstance(features, list) else features
    return dofla.linear.linearize(model, tiny.plan(model, features=features, feature_map=name, **sizes), seed=seed)


def tensors(student):
    """All that feature maps are made of, buffers as well."""
    return {name: value.clone() for name, value in student.state_dict().items() if ".dofla." in name}


def calls_of(student, batch):
    """What the teacher's attention is called with, by layer."""
    calls = {}
    with (
        recording(student, Converted.of(student).layers, lambda call: calls.update({call.name: call})),
        torch.no_grad(),
    ):
        run_body(student, batch)
    return calls


def map_of(layer, kv_head):
    """The feature map of a KV head, the heads it is of, and the place of this one among them."""
    return next((x.map, x.heads, x.heads.index(kv_head)) for x in layer.groups if kv_head in x.heads)


def real_positions(call, row):
    return range(call.key.shape[2]) if call.weight is None else call.weight[row].nonzero().flatten().tolist()


@both_maps
@pytest.mark.parametrize(
    ("family", "side", "features"),
    [("llama", None, RAGGED), ("llama", "right", EVEN), ("bert", "right", RAGGED), ("gpt2", "left", EVEN)],
)
def test_statistics_are_those_of_the_teachers_real_queries_and_keys(tiny, name, features, family, side):
    student = student_of(tiny, family, name, features, window=2)
    batch = {"input_ids": tiny.tokens(3, LENGTH)} if side is None else tiny.padded(3, LENGTH, side)
    calibrate(Converted.of(student), [batch])
    for layer_name, call in calls_of(student, batch).items():
        assert (call.weight is None) == (side is None)
        groups = call.query.shape[1] // call.key.shape[1]
        for kv_head in range(call.key.shape[1]):
            places = [(row, i) for row in range(3) for i in real_positions(call, row)]
            keys = [call.key[row, kv_head, i] for row, i in places]
            heads = range(kv_head * groups, (kv_head + 1) * groups)
            queries = [call.query[row, head, i] for row, i in places for head in heads]
            feature_map, _, place = map_of(Converted.of(student).layers[layer_name], kv_head)
            for what, vectors in (("query", queries), ("key", keys)):
                vectors = torch.stack(vectors).double()
                mean = vectors.sum(0) / len(vectors)
                std = ((vectors - mean).square().sum(0) / len(vectors)).sqrt()
                assert_close(getattr(feature_map, f"{what}_mean")[place].double(), mean, rtol=1e-4, atol=1e-5)
                assert_close(getattr(feature_map, f"{what}_std")[place].double(), std, rtol=1e-4, atol=1e-5)


def far_masses(call, layer):
    """By KV head: (far mass of the teacher, of the student by the same mass nearby, of the student) of each row that
    sees far keys and near ones, in plain loops."""
    found = {kv_head: [] for kv_head in range(call.key.shape[1])}
    kept = rounded(call.key) if layer.groups[0].int8 else call.key
    exact_tokens = {head: (group.window, group.sinks) for group in layer.groups for head in group.heads}
    groups = call.query.shape[1] // call.key.shape[1]
    with torch.no_grad():
        maps = [map_of(layer, kv_head) for kv_head in found]
        log_keys = [x.log_key(kept[:, heads].double(), call.scaling)[:, place] for x, heads, place in maps]
        for row in range(len(call.query)):
            real = list(real_positions(call, row))
            for head in range(call.query.shape[1]):
                feature_map, _, place = maps[head // groups]
                window, sinks = exact_tokens[head // groups]
                query = call.query[row, head].double()
                # A query in the place of its KV head, so that it gets the features of that head.
                alone = query.expand(1, feature_map.heads, *query.shape)
                log_queries = feature_map.log_query(alone, call.scaling)[0, place]
                for i in real:
                    near_exact, near_kept, far_exact, far_features = 0.0, 0.0, 0.0, 0.0
                    for j in (j for j in real if j <= i or not call.causal):
                        score, of_kept = (
                            call.scaling * (query[i] @ keys[row, head // groups, j].double()).item()
                            for keys in (call.key, kept)
                        )
                        if abs(i - j) < window or real.index(j) < sinks:
                            near_exact += math.exp(score)
                            near_kept += math.exp(of_kept)
                        else:
                            far_exact += math.exp(score)
                            log_kernel = torch.logsumexp(log_queries[i] + log_keys[head // groups][row, j], -1)
                            far_features += math.exp(log_kernel.item())
                    if near_exact and far_exact:
                        total = near_exact + far_exact
                        beside = far_features * near_exact / near_kept / total
                        found[head // groups].append(
                            (far_exact / total, beside, far_features / (near_kept + far_features))
                        )
    return found


@both_maps
@pytest.mark.parametrize(
    ("family", "padded", "sizes"),
    [
        ("llama", False, {"features": RAGGED, "window": 3, "sinks": 1}),
        ("llama", True, {"features": EVEN, "window": 2, "sinks": 0}),
        ("llama", True, {"features": RAGGED, "window": 0, "sinks": 2}),
        ("bert", True, {"features": EVEN, "window": 2, "sinks": 1}),
        ("llama", True, {"features": EVEN, "window": [3, 1], "sinks": [0, 2]}),
        ("llama", False, {"features": RAGGED, "window": [4, 2], "sinks": 1, "token_dtype": "int8"}),
    ],
)
def test_far_keys_weigh_what_they_weigh_in_the_teacher(tiny, name, family, padded, sizes):
    student = student_of(tiny, family, name, **sizes)
    batch = tiny.padded(2, LENGTH) if padded else {"input_ids": tiny.tokens(2, LENGTH)}
    for layer in Converted.of(student).layers.values():
        for feature_map in layer.maps:
            feature_map.shift(torch.linspace(2, -3, feature_map.heads))  # a start that is off by whole factors
    calibrate(Converted.of(student), [batch])
    for layer_name, call in calls_of(student, batch).items():
        for rows in far_masses(call, Converted.of(student).layers[layer_name]).values():
            weight = sum(teacher for teacher, _, _ in rows)
            difference = sum(teacher * math.log(teacher / beside) for teacher, beside, _ in rows) / weight
            assert abs(difference) < 1e-4
            wanted = sum(teacher * teacher for teacher, _, _ in rows) / weight
            mean = sum(teacher * student for teacher, _, student in rows) / weight
            assert mean == pytest.approx(wanted, rel=0.25)


@both_maps
@pytest.mark.parametrize(
    ("sizes", "levels"),
    [
        ({}, [False, False]),  # no exact keys
        ({"window": [3, 0], "sinks": [1, 0]}, [True, False]),
        ({"window": 50}, [False, False]),  # no far ones
        ({"sinks": 50}, [False, False]),
        ({"window": [50, 0], "sinks": [0, 50]}, [False, False]),
    ],
    ids=str,
)
def test_levels_are_set_where_there_are_exact_keys_and_far_ones(tiny, name, sizes, levels):
    student = student_of(tiny, name=name, **sizes)
    calibrate(Converted.of(student), [tiny.padded(3, LENGTH, "left")])
    for layer in Converted.of(student).layers.values():
        assert not any(feature_map.wants_data for feature_map in layer.maps)
        for feature_map, level in zip(layer.maps, levels, strict=True):
            assert ((feature_map.log_scale != 0) == level).all()


@both_maps
def test_only_statistics_and_levels_change(tiny, name):
    student = student_of(tiny, name=name, window=2)
    base, before = base_weights(student), tensors(student)
    calibrate(Converted.of(student), [{"input_ids": tiny.tokens(2, LENGTH)}])
    assert equal(base_weights(student), base)
    for key, tensor in tensors(student).items():
        changes = key.endswith(("_mean", "_std", "log_scale"))
        assert torch.equal(tensor, before[key]) != changes, key


@pytest.mark.parametrize("name", ["exponential", "mlp", "prf", "hedgehog", "performer", "none"])
def test_maps_that_were_calibrated_or_do_not_look_at_data_stay_bit_for_bit(tiny, name):
    student = student_of(tiny, name=name, window=2, sinks=1)
    if name in ("exponential", "mlp"):
        calibrate(Converted.of(student), [{"input_ids": tiny.tokens(2, LENGTH)}])
    first, forwards = tensors(student), []
    student.base_model.register_forward_pre_hook(lambda *_: forwards.append(1))
    calibrate(Converted.of(student), [{"input_ids": tiny.tokens(2, LENGTH, seed=5)}])
    assert equal(tensors(student), first)
    assert forwards == []


def statistics(student):
    return {key: value for key, value in tensors(student).items() if key.endswith(("_mean", "_std"))}


@both_maps
def test_distillation_starts_from_data_unless_told_not_to(tiny, name):
    tokens = tiny.tokens(8, LENGTH)
    asked, left = student_of(tiny, name=name, window=2), student_of(tiny, name=name, window=2)
    start = statistics(left)
    assert {value for tensor in start.values() for value in tensor.unique().tolist()} == {0.0, 1.0}
    distill(asked, tokens, **OPTIONS)
    history = distill(left, tokens, from_data=False, **OPTIONS)
    assert equal(statistics(left), start)
    assert not any(torch.equal(value, start[key]) for key, value in statistics(asked).items())
    assert history.settings["from_data"] is False


def test_the_first_batch_of_the_run_is_what_is_looked_at(tiny):
    tokens = tiny.tokens(8, LENGTH)
    student, other = student_of(tiny, window=2), student_of(tiny, window=2)
    distill(student, tokens, seed=3, context=LENGTH, **OPTIONS)
    order = torch.randperm(8, generator=generator_of(3, 0))
    calibrate(Converted.of(other), [{"input_ids": tokens[order[:2]]}])
    assert equal(statistics(student), statistics(other))
