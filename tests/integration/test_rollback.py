"""Tokens are taken back out of a cache, as assisted decoding does it."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_families import own_student, student, teacher, tokens
from transformers import DynamicCache, LlamaForCausalLM

import dofla
from dofla.integration.cache import CACHE_ARGUMENT
from dofla.integration.rollback import LEAST
from dofla.serving import ContinuousBatching

KINDS = ["compressed", "ragged", "eight_bits", "softmax_first", "plain"]


def model_of(kind):
    """In float64, where sums in another order round no code the other way."""
    return own_student("llama", kind).double()


def read(model, cache, ids, **options):
    with torch.no_grad():
        return model(ids, **{CACHE_ARGUMENT: cache}, use_cache=True, **options).logits


def assert_same(model, cache, other, rows=1):
    """The caches hold the same number of tokens, and what is read next sees the same ones."""
    assert cache.get_seq_length() == other.get_seq_length()
    more = tokens(rows, 5, seed=99)
    torch.testing.assert_close(read(model, cache, more), read(model, other, more), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=6), st.integers(1, 90))
def test_the_cache_is_that_of_the_tokens_that_stayed(kind, calls, prompt):
    model, kept = model_of(kind), tokens(1, prompt)
    cache, alone = DynamicCache(config=model.config), DynamicCache(config=model.config)
    read(model, cache, kept, logits_to_keep=2)
    for n, (length, removed) in enumerate(calls):
        more, stay = tokens(1, length, seed=n), length - min(length, removed)
        read(model, cache, more)
        cache.crop(stay - length)
        kept = torch.cat([kept, more[:, :stay]], 1)
    read(model, alone, kept)
    assert_same(model, cache, alone)


@pytest.mark.parametrize("kind", KINDS)
def test_assisted_decoding_writes_what_decoding_writes(kind):
    model, ids = model_of(kind), tokens(1, 10).repeat(1, 9)
    options = {"max_new_tokens": 40, "do_sample": False}
    wanted = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), wanted)
    assert torch.equal(model.generate(ids, assistant_model=copy.deepcopy(teacher("llama")).double(), **options), wanted)


def test_an_assistant_is_not_compressed(tiny):
    model, ids = model_of("ragged"), tokens(1, 10).repeat(1, 9)
    with pytest.raises(dofla.DoflaError, match="an assistant_model that is not compressed"):
        tiny.llama(1, vocab_size=model.config.vocab_size).double().generate(
            ids, assistant_model=model, max_new_tokens=40
        )


def test_assisted_decoding_of_a_saved_model_of_its_original_and_beside_other_calls(tmp_path):
    model, ids = own_student("llama", "compressed"), tokens(1, 10).repeat(1, 3)
    options = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 10, "do_sample": False}
    model.save_pretrained(tmp_path / "whole")
    wanted = model.generate(ids, **options)
    assert torch.equal(LlamaForCausalLM.from_pretrained(tmp_path / "whole").generate(ids, **options), wanted)
    with ContinuousBatching(model) as batching, ThreadPoolExecutor() as threads:
        assert all(torch.equal(x, wanted) for x in threads.map(lambda x: batching.generate(x, **options), [ids] * 3))
    with dofla.original(model):
        written = model.generate(ids, **options)
    assert torch.equal(dofla.restore(model).generate(ids, **options), written)


def test_tokens_that_came_one_by_one_are_taken_back(tiny):
    model, ids = model_of("compressed"), tokens(1, 200)
    cache, alone = DynamicCache(config=model.config), DynamicCache(config=model.config)
    read(model, cache, ids[:, :20])
    cache.activate_past_recording()
    for n in range(20, 200):
        read(model, cache, ids[:, n : n + 1])
    cache.crop(-LEAST)
    read(model, alone, ids[:, : 200 - LEAST])
    assert_same(model, cache, alone)


def test_padding_is_taken_back_with_the_tokens_beside_it():
    model, ids = model_of("compressed"), tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :9], mask[1, 31:33] = 0, 0
    cache, alone = DynamicCache(config=model.config), DynamicCache(config=model.config)
    read(model, cache, ids[:, :30], attention_mask=mask[:, :30])
    cache.activate_past_recording()
    read(model, cache, ids[:, 30:], attention_mask=mask)
    cache.crop(-4)
    read(model, alone, ids[:, :30], attention_mask=mask[:, :30])
    read(model, alone, ids[:, 30:36], attention_mask=mask[:, :36])
    assert_same(model, cache, alone, rows=2)


@pytest.mark.parametrize("change", ["reorder_cache", "batch_select_indices"])
def test_what_was_not_recorded_is_not_taken_back(change):
    model, ids = student("llama"), tokens(2, 9)
    cache = DynamicCache(config=model.config)
    read(model, cache, ids)
    cache.crop(0)
    with pytest.raises(dofla.DoflaError, match=r"cannot take 2 tokens back .* recorded 0: call .*at most 64"):
        cache.crop(-2)
    read(model, cache, ids)
    getattr(cache, change)(torch.tensor([1, 0]))
    with pytest.raises(dofla.DoflaError, match="recorded 0"):
        cache.crop(-2)
    assert cache.get_seq_length() == 18
    with pytest.raises(ValueError, match="negative number of tokens to remove, not 3"):
        cache.crop(3)


def test_a_static_cache_is_refused_as_graphs_record_nothing():
    model, ids = student("llama", "compressed"), tokens(1, 10).repeat(1, 3)
    with pytest.raises(ValueError, match="cache"):
        model.generate(ids, prompt_lookup_num_tokens=3, max_new_tokens=5, cache_implementation="static")
