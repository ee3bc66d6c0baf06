"""With any feature map a linearized model pads, trains and is saved as with any other; it generates in
test_generation.py."""

import pytest
import torch
from arithmetic import LOGITS
from tiny_families import MAPS, own_student, padded, plan_for, student, teacher, tokens
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import dofla
from dofla.feature_maps import FEATURE_MAPS
from dofla.feature_maps.standardized import StandardizedMap
from dofla.integration.checkpoint import feature_map_tensors

FIXED = [name for name in MAPS if not FEATURE_MAPS[name].learning_rates]

every_map = pytest.mark.parametrize("name", MAPS)


@torch.no_grad()
def output(model, ids):
    return model(input_ids=ids)[0]


@every_map
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_sequence_of_an_encoder_is_the_sequence_alone(name, side):
    model, (alone, ids, mask) = student("bert", f"ragged/{name}"), padded((12, 7), side)
    where = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        together = model(input_ids=ids, attention_mask=mask, position_ids=where)[0]
    for row, sequence in enumerate(alone):
        assert_close(together[row, mask[row].bool()], output(model, sequence)[0], **LOGITS)


@every_map
def test_an_adapter_gives_what_no_seed_would(name, tmp_path):
    teacher("llama").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    dofla.linear.linearize(model, plan_for(model, f"ragged/{name}"))
    with torch.no_grad():
        for tensor in [tensor for key, tensor in model.state_dict().items() if ".dofla." in key]:
            tensor.mul_(0.9)
    dofla.save_adapter(model, tmp_path / "adapter")
    opened, ids = dofla.load(tmp_path / "adapter"), tokens(2, 20)
    assert_close(opened.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert_close(output(opened, ids), output(model, ids), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["prf", *MAPS])
def test_what_a_map_is_made_of_stays_float32(name, tmp_path):
    whole, half = student("gpt2", f"ragged/{name}"), own_student("gpt2", f"ragged/{name}").half()
    whole.save_pretrained(tmp_path / "whole")
    half.save_pretrained(tmp_path / "half")
    casts = [
        (torch.float16, half),
        (torch.float16, dofla.load(tmp_path / "half")),
        (torch.bfloat16, own_student("gpt2", f"ragged/{name}").to("cpu", torch.bfloat16)),
        (torch.bfloat16, AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.bfloat16)),
    ]
    maps = {key.replace("groups", "dofla.groups", 1) for key in feature_map_tensors(whole)}
    for dtype, model in casts:
        assert_close(feature_map_tensors(model), feature_map_tensors(whole), rtol=0, atol=0)
        assert {weight.dtype for key, weight in model.named_parameters() if key not in maps} == {dtype}
        assert torch.isfinite(output(model, tokens(2, 20))).all()


@pytest.mark.parametrize("name", [name for name in MAPS if name not in FIXED])
def test_distillation_trains_the_parameters_and_leaves_other_buffers(name):
    model, before = own_student("llama", f"ragged/{name}"), feature_map_tensors(student("llama", f"ragged/{name}"))
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
        dofla.linear.distill(own_student("llama", f"plain/{name}"), tokens(2, 9), steps=1, batch_size=1)
