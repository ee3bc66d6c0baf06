"""``from_pretrained(..., quantization_config=dofla.CacheConfig(...))`` opens a model with a compressed cache."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import dofla
from dofla.compression.directions import default_cut
from dofla.errors import DoflaError
from dofla.integration.converted import Converted
from dofla.integration.self_samples import token_windows

TEXT = "Once there was a small cat that lived beside the sea, and it watched the waves come in. " * 400


@pytest.fixture(scope="module")
def folder(tiny, tokenizer, tmp_path_factory):
    """A model with its tokenizer, and the model itself."""
    path = tmp_path_factory.mktemp("original")
    model = tiny.llama(vocab_size=2048, max_position_embeddings=512)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def opened(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=dofla.CacheConfig(**options))


@pytest.fixture(scope="module")
def calibration(folder, tiny):
    model = AutoModelForCausalLM.from_pretrained(folder)
    return dofla.calibrate(model, dofla.TokenWindows.of(tiny.tokens(6, 96)))


@pytest.mark.parametrize("as_file", [False, True])
def test_with_a_calibration(folder, calibration, tiny, tmp_path, as_file):
    given = calibration
    if as_file:
        given = tmp_path / "calibration.safetensors"
        calibration.save(given)
    model, ids = opened(folder, size="6KB", calibration=given, context=300), tiny.tokens(2, 90)
    by_hand = AutoModelForCausalLM.from_pretrained(folder)
    dofla.compress(by_hand, size="6KB", calibration=calibration, context=300)
    assert Converted.of(model).plan == Converted.of(by_hand).plan
    assert torch.equal(model(ids).logits, by_hand(ids).logits)
    assert model.generate(ids[:1, :20], max_new_tokens=4, pad_token_id=0).shape == (1, 24)


def test_with_text(folder, tokenizer, tiny, tmp_path):
    text, ids = tmp_path / "text.txt", tiny.tokens(1, 60)
    text.write_text(TEXT, encoding="utf-8")
    options = {"ratio": 8, "head_budgets": "even"}
    model = opened(folder, data=str(text), **options)
    by_hand = AutoModelForCausalLM.from_pretrained(folder)
    dofla.compress(by_hand, token_windows(str(text), tokenizer, **default_cut(512)), **options)
    assert torch.equal(model(ids).logits, by_hand(ids).logits)


def test_it_is_saved_and_opened_again(folder, calibration, tiny, tmp_path):
    model, ids = opened(folder, size="6KB", calibration=calibration, prefill="exact"), tiny.tokens(2, 90)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert Converted.of(again).plan == Converted.of(model).plan
    assert Converted.of(again).plan.prefill == "exact"
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert torch.equal(dofla.load(tmp_path / "saved")(ids).logits, model(ids).logits)
    original = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(dofla.restore(model)(ids).logits, original(ids).logits)


def test_options_go_to_compress(folder, calibration):
    kept = "model.layers.0.self_attn"
    plan = Converted.of(opened(folder, size="3KB", calibration=calibration, keep_softmax=[kept], context=200)).plan
    assert [x.kind for x in plan.layers] == ["softmax", "compressed"]
    assert (plan.context, plan.made_by["size"]) == (200, 3_000)
    asked = {"quant_method": "dofla_cache", "size": "3KB", "context": 200}
    defaults = {"head_budgets": "measured", "prefill": "exact", "retrieval_heads": "auto", "evict": True, "bits": 3.0}
    assert dofla.CacheConfig("3KB", context=200).to_dict() == asked | defaults


def test_refusals(folder, tiny, tmp_path, calibration):
    with pytest.raises(DoflaError, match="size is '3KB' and ratio is 16: give one of them"):
        opened(folder, size="3KB", ratio=16, calibration=calibration)
    tiny.llama().save_pretrained(tmp_path)
    with pytest.raises(DoflaError, match="has no tokenizer to calibrate with: give the tokenizer, windows of text"):
        opened(tmp_path, size="3KB")
