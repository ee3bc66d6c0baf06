"""What has been put around a model or been done to its weights does not matter; what is no model is said to be none."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from sizes import compress
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig, TorchAoConfig

import dofla
from dofla.errors import DoflaError
from dofla.integration.converted import Converted, is_converted


class Parallel(nn.Module):
    """As DistributedDataParallel keeps its model."""

    def __init__(self, module):
        super().__init__()
        self.module = module


WRAPPED = {
    "peft": lambda model: get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])),
    "compiled": torch.compile,
    "parallel": Parallel,
}


@pytest.mark.parametrize("how", WRAPPED)
def test_a_wrapped_model_is_linearized_judged_and_restored(tiny, how):
    samples = tiny.tokens(6, 48)
    plain = compress(tiny.llama(), samples, tokens=48)
    model = tiny.llama()
    wrapped = WRAPPED[how](model)
    assert compress(wrapped, samples, tokens=48) is wrapped
    assert Converted.of(model).plan.layers == Converted.of(plain).plan.layers
    figures, expected = (dofla.evaluate(x, samples) for x in (wrapped, plain))
    assert figures.loss_increase == pytest.approx(expected.loss_increase, abs=1e-6)
    assert dofla.restore(wrapped) is wrapped
    assert not is_converted(model)


@pytest.mark.parametrize(
    "verb", [dofla.compress, dofla.linear.linearize, dofla.linear.profile, dofla.calibrate, dofla.linear.distill]
)
@pytest.mark.parametrize("model", ["my-model", None, nn.Linear(2, 2)])
def test_what_is_no_model_is_said_to_be_none(tiny, verb, model):
    with pytest.raises(DoflaError, match=f"is of {type(model).__name__}, no model of transformers: open one"):
        verb(model, tiny.tokens(2, 16))


@pytest.mark.parametrize(
    "verb",
    [
        lambda model, ids: compress(model, ids, tokens=48),
        lambda model, ids: compress(model, ids, tokens=48, head_budgets="even"),
        dofla.calibrate,
        dofla.linear.profile,
        dofla.linear.measure_curves,
        lambda model, ids: dofla.frontier(model, ids, {"own": [dofla.TokenWindows(ids)]}),
        lambda model, ids: dofla.frontier(model, ids % 64, {"own": [dofla.TokenWindows(ids)]}),
        lambda model, ids: dofla.evaluate(dofla.linear.linearize(model, budget=24), ids),
        lambda model, ids: dofla.linear.distill(dofla.linear.linearize(model, budget=24), ids, steps=1),
        lambda model, ids: dofla.linear.distill_end_to_end(dofla.linear.linearize(model, budget=24), ids, steps=1),
    ],
)
def test_tokens_of_another_tokenizer_are_refused(tiny, verb):
    with pytest.raises(DoflaError, match="token 64, and LlamaForCausalLM knows 0 to 63: use its own tokenizer"):
        verb(tiny.llama(), torch.arange(20, 65).expand(12, -1))


def test_a_memory_that_fades_is_judged_in_float16(tiny):
    samples = tiny.tokens(4, 64)
    student = compress(tiny.llama().half(), samples, tokens=48, head_budgets="even")
    figures = dofla.evaluate(student, samples)
    assert all(layer.output_error < 1 for layer in figures.layers.values())


def quantized_by(kind):
    """The config that transformers opens a model with; the test is passed over where its package is not installed."""
    if kind == "quanto":
        pytest.importorskip("optimum.quanto")
        return QuantoConfig(weights="int8")
    if kind == "bitsandbytes":
        pytest.importorskip("bitsandbytes")
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    if kind == "int4":
        own = pytest.importorskip("torchao.prototype.quantization.int4").PrototypeInt4WeightOnlyConfig
        return TorchAoConfig(own(32, set_inductor_config=False))
    own = pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig
    return TorchAoConfig(own(set_inductor_config=False))


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("quanto", r"are quantized \(quanto\)"),
        ("bitsandbytes", r"are quantized \(bitsandbytes\)"),
        ("int4", "tensor type.*Int4Opaque"),
    ],
)
def test_weights_that_cannot_be_saved_are_kept_as_an_adapter(tiny, tmp_path, kind, words):
    base, ids, quantized = tmp_path / "base", tiny.tokens(1, 60), quantized_by(kind)
    tiny.llama(hidden_size=64, intermediate_size=64).save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=quantized)
    before, own = model(ids).logits, (model.hf_quantizer, model.config.quantization_config)
    student = compress(model, tiny.tokens(6, 48), tokens=48)
    answer = student(ids).logits
    with pytest.raises(DoflaError, match=f"{words}.*dofla.save_adapter"):
        student.save_pretrained(tmp_path / "student")
    with pytest.raises(DoflaError, match=r"which a LlamaModel cannot save: dofla.save_adapter"):
        student.model.save_pretrained(tmp_path / "student")  # the body has the same weights
    assert not list(tmp_path.glob("student/*"))
    dofla.save_adapter(student, tmp_path / "adapter")
    again = dofla.load(tmp_path / "adapter", quantization_config=quantized)
    assert type(again.model.layers[0].mlp.up_proj) is type(student.model.layers[0].mlp.up_proj)
    assert torch.equal(again(ids).logits, answer)
    dofla.restore(student)
    assert torch.equal(model(ids).logits, before)
    assert (model.hf_quantizer, model.config.quantization_config) == own


@torch.no_grad()
def test_weights_in_int8_are_saved_beside_a_plan(tiny, tmp_path):
    base, ids = tmp_path / "base", tiny.tokens(1, 60)
    tiny.llama().save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=quantized_by("int8"))
    before, student = model(ids).logits, compress(model, tiny.tokens(6, 48), tokens=48)
    answer, place = student(ids).logits, tmp_path / "student"
    student.save_pretrained(place)
    config = student.config.quantization_config
    with pytest.raises(DoflaError, match="weights is 3, which is no quantization of weights"):
        type(config)(**config.to_dict() | {"weights": 3})
    assert sorted(path.suffix for path in place.iterdir()) == [".json", ".json", ".md", ".safetensors"]
    for n in range(2):  # also of a folder whose weights were quantized
        student = AutoModelForCausalLM.from_pretrained(place)
        assert type(student.model.layers[0].mlp.up_proj.weight).__name__ == "Int8Tensor"
        assert torch.equal(student(ids).logits, answer)
        with dofla.original(student):
            assert torch.equal(student(ids).logits, before)
        student.save_pretrained(place := tmp_path / f"again-{n}")
    assert dofla.evaluate(student, tiny.tokens(2, 60)).loss_increase < 0.5
    dofla.save_adapter(student, tmp_path / "adapter")
    assert torch.equal(dofla.load(tmp_path / "adapter")(ids).logits, answer)
    assert torch.equal(dofla.restore(student)(ids).logits, before)
    assert student.config.quantization_config.quant_method == "torchao"
