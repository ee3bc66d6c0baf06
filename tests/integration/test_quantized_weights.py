"""A model whose weights transformers has quantized is linearized, kept as an adapter, and given back as it was."""

import pytest
import torch
from sizes import compress
from transformers import AutoModelForCausalLM, QuantoConfig

import dofla
from dofla.errors import DoflaError


@pytest.fixture
def base(tiny, tmp_path):
    pytest.importorskip("optimum.quanto")
    tiny.llama().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@torch.no_grad()
def test_quantized_weights_stay_quantized_and_are_not_saved_beside_a_plan(base, tiny, tmp_path):
    ids, quantized = tiny.tokens(1, 60), QuantoConfig(weights="int8")
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=quantized)
    before, own = model(ids).logits, (model.hf_quantizer, model.config.quantization_config)
    student = compress(model, tiny.tokens(6, 48), tokens=48)
    answer = student(ids).logits
    for part in (student, student.model):  # the body has the same weights
        with pytest.raises(DoflaError, match=r"the weights are quantized \(quanto\).*dofla.save_adapter"):
            part.save_pretrained(tmp_path / "student")
    assert not (tmp_path / "student").exists()
    dofla.save_adapter(student, tmp_path / "adapter")
    again = dofla.load(tmp_path / "adapter", quantization_config=quantized)
    assert type(again.model.layers[0].mlp.up_proj).__name__ == "QLinear"
    assert torch.equal(again(ids).logits, answer)
    dofla.restore(student)
    assert torch.equal(model(ids).logits, before)
    assert (model.hf_quantizer, model.config.quantization_config) == own
