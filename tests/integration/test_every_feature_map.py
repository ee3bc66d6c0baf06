"""With any feature map a linearized model generates, pads, trains and is saved as with any other."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from arithmetic import LOGITS
from safetensors.torch import load_file, save_file
from tiny_families import CAUSAL, plan_for, teacher, tokens
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import dofla
from dofla.feature_maps import FEATURE_MAPS
from dofla.feature_maps.standardized import StandardizedMap
from dofla.integration.checkpoint import feature_map_tensors, load_feature_map_tensors
from dofla.plans.layers import FeatureLayer

MAPS = sorted(set(FEATURE_MAPS) - {"prf", "none"})
"""The positive random features that nearly all other tests run with are tested in every family there."""

FIXED = [name for name in MAPS if not FEATURE_MAPS[name].learning_rates]

every_map = pytest.mark.parametrize("name", MAPS)
STUDENTS = [*[(family, "plain") for family in CAUSAL], ("gpt2", "ragged"), ("llama", "ragged")]

every_map_in_every_family = pytest.mark.parametrize(
    ("family", "kind", "name"),
    [
        pytest.param(*where, name, marks=[] if row % len(MAPS) == column % len(STUDENTS) else pytest.mark.slow)
        for row, where in enumerate(STUDENTS)
        for column, name in enumerate(MAPS)
    ],
)
"""Pairs on the diagonal, in which each family and each map has a part, are quick enough; all others are slow."""


def own_student(family, kind, name, model=None):
    model = teacher(family) if model is None else model
    plan = plan_for(model, kind)
    layers = [replace(x, feature_map=name) if isinstance(x, FeatureLayer) else x for x in plan.layers]
    return dofla.linear.linearize(model, replace(plan, layers=layers))


student = cache(own_student)
"""Shared by the tests that do not change it."""


def generate(model, ids, **options):
    return model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, **options)


@torch.no_grad()
def output(model, ids, mask=None):
    return model(input_ids=ids, attention_mask=mask)[0]


def assert_same_student(opened, original):
    assert_close(opened.state_dict(), original.state_dict(), rtol=0, atol=0)
    ids = tokens(2, 20)
    assert_close(output(opened, ids), output(original, ids), rtol=0, atol=0)


@every_map_in_every_family
def test_greedy_search_with_cache_is_greedy_search_without(family, kind, name):
    model, ids = student(family, kind, name), tokens(2, 9)
    assert_close(generate(model, ids), generate(model, ids, use_cache=False))


@every_map_in_every_family
def test_a_left_padded_sequence_is_the_sequence_alone(family, kind, name):
    model, ids, mask = student(family, kind, name), tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    ids[1, :5], mask[1, :5] = 0, 0
    together = generate(model, ids, attention_mask=mask)
    for row, start in ((0, 0), (1, 5)):
        assert_close(together[row, 12:], generate(model, ids[row : row + 1, start:])[0, 12 - start :])


@every_map
@pytest.mark.parametrize("kind", ["plain", "ragged"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_sequence_of_an_encoder_is_the_sequence_alone(name, kind, side):
    model, ids, mask = student("bert", kind, name), tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    hidden, real = (slice(0, 5), slice(5, 12)) if side == "left" else (slice(7, 12), slice(0, 7))
    ids[1, hidden], mask[1, hidden] = 0, 0
    where = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        together = model(input_ids=ids, attention_mask=mask, position_ids=where)[0]
    assert_close(together[0], output(model, ids[:1])[0], **LOGITS)
    assert_close(together[1, real], output(model, ids[1:, real])[0], **LOGITS)


@every_map_in_every_family
def test_a_student_is_the_same_when_saved_and_opened(family, kind, name, tmp_path):
    model = student(family, kind, name)
    model.save_pretrained(tmp_path)
    assert_same_student(AutoModelForCausalLM.from_pretrained(tmp_path), model)


@every_map
def test_an_adapter_gives_what_no_seed_would(name, tmp_path):
    teacher("llama").save_pretrained(tmp_path / "base")
    model = own_student("llama", "ragged", name, AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    with torch.no_grad():
        for tensor in [tensor for key, tensor in model.state_dict().items() if ".dofla." in key]:
            tensor.mul_(0.9)
    dofla.save_adapter(model, tmp_path / "adapter")
    assert_same_student(dofla.load(tmp_path / "adapter"), model)


@every_map
def test_what_a_map_is_made_of_stays_float32(name, tmp_path):
    expected = feature_map_tensors(student("gpt2", "ragged", name))
    student("gpt2", "ragged", name).save_pretrained(tmp_path / "whole")
    half = own_student("gpt2", "ragged", name).half()
    half.save_pretrained(tmp_path / "half")
    models = [half, own_student("gpt2", "ragged", name).to(torch.bfloat16)]
    models += [AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.bfloat16)]
    models += [dofla.load(tmp_path / "half")]
    for model in models:
        found = feature_map_tensors(model)
        assert {tensor.dtype for tensor in found.values()} == {torch.float32}
        assert_close(found, expected, rtol=0, atol=0)
        assert torch.isfinite(output(model, tokens(2, 20))).all()


@pytest.mark.slow
@every_map
def test_a_checkpoint_with_a_part_of_a_map_missing_or_cut_is_refused_with_its_name(name, tmp_path):
    student("llama", "ragged", name).save_pretrained(tmp_path / "whole")
    path = tmp_path / "whole" / "model.safetensors"
    whole = load_file(path)
    parts = [key for key in whole if ".layers.1." in key and ".dofla." in key]
    assert parts
    for part in parts:
        others = {key: tensor for key, tensor in whole.items() if key != part}
        for tensors in (others, others | {part: whole[part][:, :-1].contiguous()}):
            save_file(tensors, path, metadata={"format": "pt"})
            with pytest.raises(dofla.DoflaError, match=rf"does not fit its plan: {part} is missing"):
                dofla.load(tmp_path / "whole")


@pytest.mark.parametrize("name", ["dijiang_code", "performer"])
def test_an_adapter_without_its_projection_is_refused(name):
    model = own_student("llama", "plain", name)
    tensors = feature_map_tensors(model)
    del tensors["model.layers.1.self_attn.groups.0.map.z"]
    with pytest.raises(dofla.DoflaError, match=r"layers\.1\.self_attn\.groups\.0\.map\.z is on one side only"):
        load_feature_map_tensors(model, tensors, "adapter")


@pytest.mark.parametrize("name", [name for name in MAPS if name not in FIXED])
def test_distillation_trains_the_parameters_and_leaves_other_buffers(name):
    model, before = own_student("llama", "ragged", name), feature_map_tensors(student("llama", "ragged", name))
    history = dofla.linear.distill(model, tokens(8, 24), steps=4, batch_size=2)
    assert torch.isfinite(history.losses).all()
    trained = set(FEATURE_MAPS[name].learning_rates)
    if issubclass(FEATURE_MAPS[name], StandardizedMap):
        trained |= {f"{side}_{what}" for side in ("query", "key") for what in ("mean", "std")}
    for key, tensor in feature_map_tensors(model).items():
        assert torch.equal(tensor, before[key]) == (key.rpartition(".")[2] not in trained), key


@pytest.mark.parametrize("name", FIXED)
def test_distillation_says_that_a_fixed_map_has_nothing_to_train(name):
    with pytest.raises(dofla.DoflaError, match="nothing to train"):
        dofla.linear.distill(own_student("llama", "plain", name), tokens(2, 9), steps=1, batch_size=1)
