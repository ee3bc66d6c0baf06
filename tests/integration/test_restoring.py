"""Linearizing can be undone, bit for bit, and suspended for a while."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from arithmetic import LOGITS
from students import everything
from tiny_families import CAUSAL, inputs, own_student, plan_for, student, teacher, tokens
from torch.testing import assert_close
from transformers import DynamicCache, LlamaForCausalLM

import dofla
from dofla.integration.checkpoint import load_any
from dofla.integration.converted import Converted, is_converted

FAMILIES = [*CAUSAL, "bert", "roberta", "vit"]


@torch.no_grad()
def outputs(model):
    return model(**inputs(model))[0]


@pytest.mark.parametrize(
    ("family", "kind"), [*[(family, "plain") for family in FAMILIES], ("llama", "eight_bits"), ("llama", "compressed")]
)
def test_a_restored_model_is_the_original_bit_for_bit(family, kind):
    model = own_student(family, kind)
    original = teacher(family).to(model.dtype)
    assert (outputs(model) - outputs(original)).abs().max() > 1e-3
    assert dofla.restore(model) is model
    assert everything(model) == everything(original)
    assert_close(outputs(model), outputs(original), rtol=0, atol=0)
    assert_close(model.state_dict(), original.state_dict(), rtol=0, atol=0)


def test_a_model_with_the_config_of_a_student_has_a_teacher_of_its_own():
    model = type(teacher("llama"))(own_student("llama").config)
    original = copy.deepcopy(model)
    original.set_attn_implementation("sdpa")
    dofla.linear.linearize(model, plan_for(model))
    with dofla.original(model):
        assert_close(outputs(model), outputs(original), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["ragged", "eight_bits"])
def test_a_student_can_be_pickled(kind):
    model = student("llama", kind)
    other = pickle.loads(pickle.dumps(model))
    assert_close(outputs(other), outputs(model), rtol=0, atol=0)
    assert_close(outputs(dofla.restore(other)), outputs(teacher("llama").to(model.dtype)), rtol=0, atol=0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_attention_implementation_the_model_had_comes_back(implementation):
    model = teacher("llama")
    model.set_attn_implementation(implementation)
    expected = outputs(model)
    dofla.linear.linearize(model, plan_for(model))
    with dofla.original(model):
        assert torch.equal(outputs(model), expected)
    dofla.restore(model)
    assert model.config._attn_implementation == implementation
    assert torch.equal(outputs(model), expected)


def test_the_original_is_one_in_its_own_thread_alone():
    model = dofla.linear.linearize(teacher("llama"))
    expected = outputs(model)
    with dofla.original(model), ThreadPoolExecutor(1) as pool:
        assert not torch.equal(outputs(model), expected)
        assert torch.equal(pool.submit(outputs, model).result(), expected)
    with pytest.raises(ZeroDivisionError), dofla.original(model):
        raise ZeroDivisionError
    assert torch.equal(outputs(model), expected)


def test_blocks_of_several_threads_may_end_in_any_order():
    model = dofla.linear.linearize(teacher("llama"))
    expected, blocks = outputs(model), [dofla.original(model) for _ in range(2)]
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for pool, block in zip((one, other), blocks, strict=True):
            pool.submit(block.__enter__).result()
        for pool, block in zip((one, other), blocks, strict=True):
            pool.submit(block.__exit__, None, None, None).result()
    assert torch.equal(outputs(model), expected)


def test_models_of_one_config_are_converted_one_by_one(tmp_path):
    config = teacher("llama").config
    first, second = (LlamaForCausalLM(config).eval().to(torch.float64) for _ in range(2))
    original = outputs(second)
    plans = [plan_for(first), dofla.linear.linearize(copy.deepcopy(first), budget=12).config.quantization_config.plan]
    dofla.linear.linearize(first, plans[0])
    expected = outputs(first)
    assert torch.equal(outputs(second), original)
    dofla.linear.linearize(second, plans[1])
    assert not hasattr(config, "quantization_config")
    assert torch.equal(outputs(first), expected)
    first.save_pretrained(tmp_path)
    assert torch.equal(outputs(load_any(tmp_path)), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_suspended_student_is_its_teacher(family):
    model, original = own_student(family), teacher(family)
    before = outputs(model)
    with dofla.original(model) as suspended:
        assert suspended is model
        assert_close(outputs(model), outputs(original), rtol=0, atol=0)
        if family in CAUSAL:
            ids = tokens(2, 7)
            for options in ({}, {"num_beams": 2}, {"use_cache": False}):
                options |= {"max_new_tokens": 6, "do_sample": False}
                assert_close(model.generate(ids, **options), original.generate(ids, **options))
    assert_close(outputs(model), before, rtol=0, atol=0)


def test_the_seed_decides_the_feature_maps():
    logits = []
    for seed in (0, 0, 1):
        model = teacher("llama")
        logits.append(outputs(dofla.linear.linearize(model, plan_for(model), seed=seed)))
    assert_close(logits[0], logits[1], rtol=0, atol=0)
    assert not torch.equal(logits[0], logits[2])


def test_a_copy_of_a_student_has_a_life_of_its_own():
    model = own_student("llama", "ragged")
    before = outputs(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for layer in Converted.of(other).layers.values():
            layer.reset_parameters(torch.Generator().manual_seed(9))
    assert not torch.equal(outputs(other), before)
    dofla.restore(other)
    assert everything(other) == everything(teacher("llama"))
    assert_close(outputs(other), outputs(teacher("llama")), rtol=0, atol=0)
    assert is_converted(model)
    assert_close(outputs(model), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, "all_softmax") for family in ("llama", "gpt2", "gemma2", "gpt_oss", "t5", "bart")),
        ("mistral_sliding", "plain"),
    ],
)
def test_with_all_layers_kept_softmax_nothing_changes(family, kind):
    original, model = teacher(family), own_student(family, kind)
    ids = tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    extra = {"decoder_input_ids": tokens(2, 9)} if original.config.is_encoder_decoder else {}
    with torch.no_grad():
        got, expected = (m(input_ids=ids, attention_mask=mask, **extra).logits for m in (model, original))
    real = slice(None) if extra else mask.bool()
    assert_close(got[real], expected[real], rtol=0, atol=0)
    for search in ({}, {"num_beams": 2}):
        assert_close(model.generate(ids, **options, **search), original.generate(ids, **options, **search))


def test_a_cache_filled_by_softmax_is_refused():
    model = own_student("llama")
    cache = DynamicCache(config=model.config)
    with dofla.original(model), torch.no_grad():
        model(tokens(1, 5), past_key_values=cache)
    with pytest.raises(
        dofla.DoflaError, match=r"already holds 5 tokens of softmax attention in layer 0.*prefix tuning"
    ):
        model(tokens(1, 1), past_key_values=cache)


@pytest.mark.parametrize("back", [dofla.original, lambda model: nullcontext(dofla.restore(model))])
def test_a_cache_filled_by_linear_attention_is_refused_by_softmax(back):
    model = own_student("llama")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(1, 5), past_key_values=cache)
    with back(model), pytest.raises(dofla.DoflaError, match="was filled by a compressed or linear model"):
        model(tokens(1, 1), past_key_values=cache)


@pytest.mark.parametrize("kind", ["ragged", "eight_bits"])
def test_a_cache_can_be_emptied_and_its_rows_chosen_and_repeated(kind):
    model, ids = student("llama", kind), tokens(3, 9)
    step = tokens(3, 1, seed=5)
    caches = [DynamicCache(config=model.config) for _ in range(3)]
    with torch.no_grad():
        first, *_ = [model(ids, past_key_values=cache).logits for cache in caches]
        expected = model(step, past_key_values=caches[0]).logits
        chosen = torch.tensor([2, 0])
        caches[1].batch_select_indices(chosen)
        assert_close(model(step[chosen], past_key_values=caches[1]).logits, expected[chosen], **LOGITS)
        caches[2].batch_repeat_interleave(2)
        repeated = step.repeat_interleave(2, 0)
        assert_close(model(repeated, past_key_values=caches[2]).logits, expected.repeat_interleave(2, 0), **LOGITS)
        caches[0].reset()
        assert caches[0].get_seq_length() == 0
        assert_close(model(ids, past_key_values=caches[0]).logits, first, rtol=0, atol=0)
