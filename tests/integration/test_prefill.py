"""How a prompt enters the cache: exactly, or token by token."""

import pytest
import torch
from transformers import DynamicCache

import dofla
from dofla.integration.interface import token_by_token

LENGTH = 200


@pytest.fixture
def windows(tiny):
    return tiny.tokens(3, LENGTH)


def compressed(tiny, windows, prefill):
    return dofla.compress(tiny.llama(), windows, ratio=4, context=256, head_budgets="even", prefill=prefill)


@torch.no_grad()
def read(model, ids):
    return model(input_ids=ids, past_key_values=DynamicCache(config=model.config), use_cache=True)


def test_an_exact_prefill_answers_as_the_original(tiny, windows):
    ids = windows[:1]
    right = tiny.llama()(input_ids=ids, use_cache=False).logits
    model = compressed(tiny, windows, "exact")
    assert torch.allclose(read(model, ids).logits, right, atol=1e-4)
    with token_by_token():
        assert not torch.allclose(read(model, ids).logits, right, atol=1e-2)


@pytest.mark.parametrize("prefill", ["auto", "sequential"])
def test_on_a_cpu_and_without_a_cache_tokens_are_read_one_after_the_other(tiny, windows, prefill):
    ids = windows[:1]
    model = compressed(tiny, windows, prefill)
    with torch.no_grad():
        single = model(input_ids=ids, use_cache=False).logits
    assert torch.allclose(read(model, ids).logits, single, atol=1e-4)
    assert torch.equal(compressed(tiny, windows, "exact")(input_ids=ids, use_cache=False).logits, single)


def test_decoding_goes_on_after_an_exact_prefill(tiny, windows):
    """Left-padded rows are continued as those rows alone are."""
    model, ids = compressed(tiny, windows, "exact"), windows[:2].clone()
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    together = model.generate(ids, attention_mask=mask, **options)[:, LENGTH:]
    alone = model.generate(ids[1:, 30:], attention_mask=mask[1:, 30:], **options)[:, LENGTH - 30 :]
    assert torch.equal(together[1:], alone)
