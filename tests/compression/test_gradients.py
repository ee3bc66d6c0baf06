"""Compressed caches under gradients: no answer changes, and gradients are those of softmax attention, or refused."""

from contextlib import nullcontext

import pytest
import torch
from sizes import FAMILIES, compress
from tiny_families import teacher, tokens
from transformers import DynamicCache

import dofla
from dofla.data import TokenWindows
from dofla.errors import DoflaError
from dofla.evaluation.language import next_token_figures
from dofla.integration.converted import Converted
from dofla.integration.interface import dofla_attention, softmax_attention


def compressed(model, slots=48, **options):
    return compress(model, tokens(4, 48), slots, **{"head_budgets": "even", "prefill": "sequential", **options})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_change_no_answer(family, dtype):
    model, ids = compressed(teacher(family).to(dtype)), tokens(2, 90)
    logits = model(ids, use_cache=False).logits
    assert logits.requires_grad
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, logits)


@pytest.mark.parametrize("padding", [0, 7])
def test_what_passes_back_is_what_passes_through_softmax_attention(padding):
    model = compressed(teacher("llama"))
    module = model.get_submodule(next(iter(Converted.of(model).layers)))
    heads, kv_heads, dim = model.config.num_attention_heads, module.dofla.kv_heads, module.head_dim
    generator = torch.Generator().manual_seed(5)
    vectors = [torch.randn(2, n, 90, dim, generator=generator).requires_grad_() for n in (heads, kv_heads, kv_heads)]
    mask = None
    if padding:
        mask = torch.ones(2, 90, dtype=torch.int64)
        mask[1, :padding] = 0
    upstream = torch.randn(2, 90, heads, dim, generator=generator)
    upstream[1, :padding] = 0  # of padding nothing is asked
    answers = [f(module, *vectors, mask, scaling=module.scaling)[0] for f in (dofla_attention, softmax_attention)]
    found, wanted = (torch.autograd.grad(out, vectors, upstream) for out in answers)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("prefill", ["sequential", "exact"])
def test_a_first_call_with_a_cache_has_the_gradients_of_one_without(prefill):
    model, ids = compressed(teacher("llama").double(), prefill=prefill), tokens(2, 90)
    found = []
    for cache in (None, DynamicCache(config=model.config)):
        model.zero_grad()
        model(ids, past_key_values=cache, use_cache=cache is not None).logits[:, :5].square().mean().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    # Of the first tokens: what nothing was evicted before is the same however it was read, up to quantization.
    assert len(found[0]) == len(found[1]) > 0
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= (1e-9 if prefill == "sequential" else 0.2) * one.norm() + 1e-12


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 30])
@pytest.mark.parametrize("prefill", ["sequential", "exact"])
def test_a_call_that_goes_on_from_tokens_read_without_gradients_answers_and_refuses_them(family, length, prefill):
    """The state holds no gradients of earlier tokens: those that passed would be wrong, and nobody would notice."""
    model, ids = compressed(teacher(family), prefill=prefill), tokens(1, 60 + length)

    def read(go_on):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :60], past_key_values=cache, use_cache=True)
        with go_on:
            return model(ids[:, 60:], past_key_values=cache, use_cache=True).logits

    piece = read(nullcontext())
    assert torch.equal(piece, read(torch.no_grad()))
    with pytest.raises(DoflaError, match="no gradients pass through a cache that holds tokens read without gradients"):
        piece.square().mean().backward()


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_calls_with_a_cache_are_those_of_one_pass(family):
    """All tokens are held, and some of the first call are padding."""
    ids, found = tokens(2, 40), []
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    for pieces in ((40,), (25, 1, 14)):
        model = compressed(teacher(family).double(), 200)
        cache, out, seen = DynamicCache(config=model.config), [], 0
        for piece, place in zip(ids.split(pieces, 1), places.split(pieces, 1), strict=True):
            seen += piece.shape[1]
            own = {"position_ids": place, "attention_mask": mask[:, :seen]}
            out.append(model(piece, past_key_values=cache, use_cache=True, **own).logits)
        torch.cat(out, 1)[mask.bool()].square().mean().backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, one in found[0].items():
        assert (one - found[1][name]).norm() <= 1e-9 * one.norm() + 1e-12


@pytest.mark.parametrize("checkpointing", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_trained_end_to_end_it_comes_closer(family, checkpointing):
    model, windows = compressed(teacher(family), 16), TokenWindows.of(tokens(8, 90))

    def divergence():
        return next_token_figures(model, windows, batch_size=8)["kl"]

    before = divergence()
    options = {"learning_rates": {"weights": 1e-3}, "gradient_checkpointing": checkpointing, "context": 90}
    losses = dofla.linear.distill_end_to_end(model, windows, steps=15, batch_size=8, progress=False, **options).losses
    assert losses[0].item() == pytest.approx(before, rel=1e-3)
    assert divergence() < 0.9 * before
