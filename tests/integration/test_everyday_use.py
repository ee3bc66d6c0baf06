"""The other things people do with a model: pipelines, streams, threads, compiling, long texts."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from arithmetic import LOGITS
from tiny_families import CAUSAL, VOCABULARY, own_student, plan_for, student, teacher, tokens
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, DynamicCache, pipeline
from word_tokenizers import word_tokenizer

import dofla
from dofla.integration.cache import cache_bytes
from dofla.integration.converted import Converted


@pytest.fixture(scope="module")
def tokenizer():
    words = [f"w{n}" for n in range(1, VOCABULARY)]
    return word_tokenizer(["<pad>", *words], "<pad>", pad_token="<pad>", padding_side="left")


def test_a_text_generation_pipeline_takes_a_student(tokenizer):
    model, options = student("llama", "ragged"), {"max_new_tokens": 5, "do_sample": False}
    texts = ["w3 w14 w15 w92 w6", "w2 w7 w18"]
    write = pipeline("text-generation", model, tokenizer=tokenizer, device="cpu")
    together = write(texts, batch_size=2, **options)
    for text, (answer,) in zip(texts, together, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        made = model.generate(ids, **options)[0, ids.shape[1] :]
        assert answer["generated_text"] == text + tokenizer.decode(made)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_a_classifier_can_be_linearized_and_padding_does_not_matter(family):
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(teacher(family).config).eval()
    dofla.linear.linearize(model, plan_for(model, "ragged"))
    ids = torch.cat([tokens(1, 12), torch.zeros(1, 5, dtype=torch.long)], 1)
    with torch.no_grad():
        padded = model(ids, attention_mask=(ids > 0).long()).logits
        assert_close(padded, model(ids[:, :12]).logits, **LOGITS)


@pytest.mark.parametrize("family", CAUSAL)
def test_any_family_goes_the_way_from_profile_to_student(family):
    model = teacher(family)
    profile = dofla.linear.profile(model, tokens(4, 24), samples=32)
    plan = dofla.linear.allocate(profile, budget=8, window=2, sinks=1)
    dofla.linear.linearize(model, plan)
    assert set(Converted.of(model).layers) == {layer.name for layer in profile.layers}
    assert model.generate(tokens(1, 5), max_new_tokens=3).shape == (1, 8)


def test_several_threads_can_generate_with_one_model():
    model = student("llama", "ragged")
    prompts = [tokens(1, 5 + n, seed=n) for n in range(8)]
    alone = [model.generate(ids, max_new_tokens=10, do_sample=False) for ids in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda ids: model.generate(ids, max_new_tokens=10, do_sample=False), prompts))
    assert_close(together, alone)


@pytest.mark.parametrize("family", [family for family in CAUSAL if family != "gemma3"])
def test_a_static_cache_gives_what_the_dynamic_one_gives(family):
    model, ids = student(family), tokens(2, 9)
    options = {"max_new_tokens": 6, "do_sample": False}
    static = model.generate(ids, cache_implementation="static", **options)
    assert_close(static, model.generate(ids, **options))


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
@pytest.mark.parametrize("kind", ["plain", "ragged", "eight_bits"])
def test_a_state_has_the_bytes_the_plan_says(family, kind):
    model = student(family, kind)
    plan = Converted.of(model).plan
    # Each group of heads keeps a weight for every exact token beside keys and values.
    groups = [group for layer in Converted.of(model).layers.values() for group in layer.groups]
    weights = 4 * sum(group.window + group.sinks for group in groups)
    expected = plan.state_bytes(model.dtype) + weights + wider_means(model)
    for batch, length in ((1, 30), (3, 300)):
        cache, ids = DynamicCache(config=model.config), tokens(batch, length)
        for new in (1, 12):
            ids = model.generate(ids, past_key_values=cache, max_new_tokens=new, min_new_tokens=new, pad_token_id=0)
            assert cache_bytes(cache) == batch * expected
        assert cache.get_seq_length() == length + 12


def wider_means(model):
    """What the features of a model in float64 take beyond those of all others, whose means are float32."""
    means = sum(sum(layer.features_per_head) * layer.value_dim for layer in Converted.of(model).plan.layers)
    return 4 * means if model.dtype == torch.float64 else 0


def test_a_student_can_get_a_larger_vocabulary(tmp_path):
    model = own_student("llama", "ragged")
    model.resize_token_embeddings(VOCABULARY + 8)
    model.save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert opened(tokens(1, 9)).logits.shape[-1] == VOCABULARY + 8
        assert_close(opened(tokens(1, 9)).logits, model(tokens(1, 9)).logits, rtol=0, atol=0)


def test_a_student_opens_on_a_device_map(tmp_path):
    model = student("llama", "ragged")
    model.save_pretrained(tmp_path)
    for device_map in ("cpu", {"": "cpu"}, "auto"):
        opened = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
        ids = tokens(1, 9).to(opened.device)
        with torch.no_grad():
            assert_close(opened(ids).logits.cpu(), model(ids.cpu()).logits, **LOGITS)


def test_a_lora_of_a_student_opens_beside_it_again(tmp_path):
    peft = pytest.importorskip("peft", reason="adapters of weights are its")
    own_student("llama", "ragged").save_pretrained(tmp_path / "student")
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    learner = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "student"), config)
    learner.save_pretrained(tmp_path / "lora")
    with torch.no_grad():
        expected = learner(tokens(2, 9)).logits
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
        assert not torch.allclose(base(tokens(2, 9)).logits, expected, atol=1e-2)
        opened = peft.PeftModel.from_pretrained(base, tmp_path / "lora")
        assert_close(opened(tokens(2, 9)).logits, expected, **LOGITS)
        merged = opened.merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
        assert_close(dofla.load(tmp_path / "merged")(tokens(2, 9)).logits, expected, **LOGITS)
