"""Calibrations that were made before, and where they are found."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

import dofla
from dofla.compression import compress as module
from dofla.compression import known
from dofla.errors import DoflaError
from dofla.integration.converted import Converted


@pytest.fixture
def folder(tiny, tokenizer, tmp_path, monkeypatch):
    """A model with its tokenizer, of a user who has calibrated nothing yet."""
    monkeypatch.setattr(known.constants, "HF_HOME", tmp_path / "home")
    monkeypatch.setattr(known, "SHIPPED", tmp_path / "shipped")
    tiny.llama(vocab_size=2048).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def plan_of(folder, **options):
    """Of the model, compressed without windows."""
    return Converted.of(dofla.compress(AutoModelForCausalLM.from_pretrained(folder), size="9KB", **options)).plan


def test_a_model_is_calibrated_once(folder, monkeypatch, caplog):
    first = plan_of(folder)
    (kept,) = known.cache_folder().iterdir()
    assert kept.name.endswith("-model.safetensors")
    monkeypatch.setattr(module, "measure", None)
    assert plan_of(folder) == first
    assert "in your cache is used" in caplog.text
    assert "head_budgets" not in plan_of(folder, head_budgets="even").made_by
    with pytest.raises(DoflaError, match="unknown head_budgets 'odd': choose one of measured, even"):
        plan_of(folder, head_budgets="odd")
    assert plan_of(folder, retrieval_heads=1, context=64).made_by["retrieval_heads"]
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=dofla.CacheConfig("9KB"))
    assert Converted.of(model).plan == first


def test_weights_in_int8_have_the_calibration_of_the_model(folder, monkeypatch):
    torchao = pytest.importorskip("torchao.quantization")
    first = plan_of(folder)
    monkeypatch.setattr(module, "measure", None)
    quantized = TorchAoConfig(torchao.Int8WeightOnlyConfig(set_inductor_config=False))
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantized)
    assert Converted.of(dofla.compress(model, size="9KB")).plan == first


@pytest.mark.parametrize("place", ["shipped", "elsewhere", "hub"])
def test_others_have_made_them(folder, place, tmp_path, monkeypatch, caplog):
    first = plan_of(folder)
    (kept,) = known.cache_folder().iterdir()
    (tmp_path / place).mkdir()
    kept = kept.rename(tmp_path / place / kept.name)
    if place == "elsewhere":
        monkeypatch.setenv(known.PLACE, str(tmp_path / place))
    model = AutoModelForCausalLM.from_pretrained(folder)
    if place == "hub":
        model.config._name_or_path = "somebody/model"
        monkeypatch.setattr(known, "cached_file", lambda _, name, **quiet: {"somebody/model.safetensors": kept}[name])
    monkeypatch.setattr(module, "measure", None)
    assert Converted.of(dofla.compress(model, size="9KB")).plan.made_by == first.made_by
    words = {"shipped": "those that come with dofla", "elsewhere": str(tmp_path / place), "hub": "on the hub"}
    assert f"{words[place]} is used" in caplog.text


@pytest.mark.parametrize(("change", "told"), [(0.005, False), (0.1, True)])  # of eight bits, and of fine-tuning
def test_other_weights_are_another_model(folder, tiny, change, told, monkeypatch, caplog):
    with pytest.raises(DoflaError, match=r"calibration is 'base': none of a model with the shapes of .* was found"):
        plan_of(folder, calibration="base")
    plan_of(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(change * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    model.save_pretrained(folder)
    measured, real = [], module.measure
    monkeypatch.setattr(module, "measure", lambda *given, **options: measured.append(1) or real(*given, **options))
    plan_of(folder, calibration="base")
    assert not measured
    assert ("made with other weights" in caplog.text) == told
    plan_of(folder)
    assert bool(measured) == told


def test_a_damaged_one_is_passed_over(folder, caplog):
    plan_of(folder)
    (kept,) = known.cache_folder().iterdir()
    kept.write_bytes(b"half")
    plan_of(folder)
    assert "passed over" in caplog.text
    assert dofla.Calibration.load(kept).retrieval


def test_where_there_is_no_repository_the_model_is_calibrated(folder, monkeypatch):
    def missing(*_, **__):  # what transformers does, whatever its flags say
        raise OSError("dofla/calibrations is not a valid model identifier")

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config._name_or_path = "somebody/model"
    monkeypatch.setattr(known, "cached_file", missing)
    monkeypatch.setattr(module, "tokenizer_of", lambda *_, **__: AutoTokenizer.from_pretrained(folder))
    assert Converted.of(dofla.compress(model, size="9KB")).plan.made_by["held_out"]


def test_what_cannot_be_kept_is_used(folder, tmp_path):
    (tmp_path / "home").write_text("no folder")
    assert plan_of(folder).made_by["held_out"]


def test_a_folder_without_a_tokenizer_has_none(folder):
    (folder / "tokenizer.json").unlink()
    for path in folder.glob("*token*"):
        path.unlink()
    with pytest.raises(DoflaError, match="has no tokenizer to calibrate with: give the tokenizer"):
        plan_of(folder)


def test_windows_beside_a_calibration_are_refused(folder, tiny):
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(DoflaError, match="windows and calibration are both given: give one of them"):
        dofla.compress(model, tiny.tokens(2, 32), size="9KB", calibration="base")
