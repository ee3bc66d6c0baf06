import sys

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, TorchAoConfig

import dofla
from dofla.errors import DoflaError
from dofla.runs.opening import open_converted, open_original
from dofla.storage.extras import MissingExtra

torchao = pytest.importorskip("torchao.quantization")


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def base(request, tiny, tokenizer, tmp_path):
    tiny.llama(tie_word_embeddings=request.param).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def logits(model):
    with torch.no_grad():
        return model(torch.arange(1, 21)[None]).logits.float()


def test_all_linear_layers_are_in_int8_and_stay_so_in_files(base, tmp_path):
    model, _ = open_original(str(base), dtype="int8")
    right = logits(AutoModelForCausalLM.from_pretrained(base))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert isinstance(module.weight, torchao.Int8Tensor)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert type(embedding) is nn.Parameter
    assert embedding.is_floating_point()
    assert not model.config.tie_word_embeddings
    own = AutoModelForCausalLM.from_pretrained(base).get_output_embeddings().weight
    step = own.abs().amax(-1, keepdim=True) / 127
    assert ((head.dequantize() - own).abs() <= step * (0.5 + 127 * torch.finfo(own.dtype).eps)).all()
    assert (logits(model) - right).norm() < 0.05 * right.norm()
    dofla.compress(model, ratio=4, calibration=dofla.calibrate(model, torch.arange(64).view(2, 32)))
    model.save_pretrained(tmp_path / "small")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert torch.equal(logits(again), logits(model))
    assert torch.equal(logits(dofla.load(tmp_path / "small")), logits(model))
    assert isinstance(again.get_output_embeddings().weight, torchao.Int8Tensor)
    with pytest.raises(DoflaError, match="it is compressed already and keeps its weights"):
        open_converted(str(tmp_path / "small"), dtype="int8")


def test_an_adapter_opens_with_its_base_in_int8(base, tmp_path):
    model, _ = open_original(str(base), dtype="int8")
    dofla.compress(model, ratio=4, calibration=dofla.calibrate(model, torch.arange(64).view(2, 32)))
    dofla.save_adapter(model, tmp_path / "adapter")
    again, _ = open_converted(str(tmp_path / "adapter"), dtype="int8")
    assert torch.equal(logits(again), logits(model))


def test_what_cannot_be_in_int8_is_refused(base, tmp_path, monkeypatch):
    with pytest.raises(DoflaError, match="dtype is int8: with offload"):
        open_original(str(base), dtype="int8", offload=tmp_path)
    model, tokenizer = open_original(str(base), dtype="int8")
    model.save_pretrained(tmp_path / "int8")
    tokenizer.save_pretrained(tmp_path / "int8")
    again, _ = open_original(str(tmp_path / "int8"), dtype="int8")
    assert torch.equal(logits(again), logits(model))
    float8 = TorchAoConfig(torchao.Float8WeightOnlyConfig(set_inductor_config=False))
    AutoModelForCausalLM.from_pretrained(base, quantization_config=float8).save_pretrained(tmp_path / "float8")
    tokenizer.save_pretrained(tmp_path / "float8")
    with pytest.raises(DoflaError, match="float8 is quantized already and keeps its weights: leave dtype out"):
        open_original(str(tmp_path / "float8"), dtype="int8")
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(MissingExtra, match=r"dtype=int8 needs torchao.quantization: pip install 'dofla\[int8\]'"):
        open_original(str(base), dtype="int8")
