"""A memory that fades under gradients: the student's own answers, and what passes back through them."""

from __future__ import annotations

import pytest
import torch
from sizes import compress
from tiny_families import teacher, tokens
from transformers import DynamicCache

import dofla
from dofla.data import TokenWindows
from dofla.evaluation.language import next_token_figures
from dofla.integration.interface import linear_attention, softmax_attention
from dofla.integration.student import Student

FAMILIES = ["gpt2", "gpt_neox", "llama", "opt"]


def compressed(model, tokens=48):
    return compress(model, tokens(4, 48), budget=budget, head_budgets="even")


def attention_of(student):
    """The student's first attention, as its module calls it, and queries, keys and values of that layer's shape."""
    module = student.get_submodule(next(iter(Student.of(student).layers)))
    layer = module.dofla
    heads, dim = student.config.num_attention_heads, layer.coded_tiers["0"].key.dim
    kv_heads = len(layer.features)
    draw = torch.Generator().manual_seed(5)
    shapes = [(2, heads, 90, dim), (2, kv_heads, 90, dim), (2, kv_heads, 90, dim)]
    vectors = [torch.randn(shape, generator=draw, dtype=student.dtype, requires_grad=True) for shape in shapes]
    return module, vectors


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_change_no_answer(family, dtype):
    student, ids = compressed(teacher(family).to(dtype)), tokens(2, 90)
    logits = student(ids, use_cache=False).logits
    assert logits.requires_grad
    with torch.no_grad():
        assert torch.equal(student(ids, use_cache=False).logits, logits)


@pytest.mark.parametrize("padding", [0, 7])
def test_what_passes_back_is_what_passes_through_softmax_attention(padding):
    student = compressed(teacher("llama"))
    module, vectors = attention_of(student)
    mask = None
    if padding:
        mask = torch.ones(2, 90, dtype=torch.int64)
        mask[1, :padding] = 0
    upstream = torch.randn(2, 90, *vectors[0].shape[1::2], generator=torch.Generator().manual_seed(6))
    upstream[1, :padding] = 0  # of padding nothing is asked
    found = torch.autograd.grad(linear_attention(module, *vectors, mask, module.scaling)[0], vectors, upstream)
    wanted = torch.autograd.grad(softmax_attention(module, *vectors, mask, module.scaling)[0], vectors, upstream)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)


def test_a_text_that_goes_on_from_a_state_passes_gradients_through_its_codes():
    # In float64, where two ways to the same number hardly ever end on two sides of a step of a code.
    student, ids = compressed(teacher("llama").double()), tokens(1, 90)
    whole = student(ids, use_cache=False).logits[:, 60:]
    cache = DynamicCache(config=student.config)
    student(ids[:, :60], past_key_values=cache, use_cache=True)
    piece = student(ids[:, 60:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(piece, whole, rtol=0, atol=1e4 * torch.finfo(torch.float64).eps)
    piece.square().mean().backward()
    assert all(p.grad.isfinite().all() for p in student.parameters() if p.grad is not None)
    assert any(p.grad is not None for p in student.parameters())


@pytest.mark.parametrize(("family", "checkpointing"), [*((family, False) for family in FAMILIES), ("llama", True)])
def test_trained_end_to_end_it_comes_closer(family, checkpointing):
    student, windows = compressed(teacher(family), tokens=16), TokenWindows.of(tokens(8, 90))

    def divergence():
        return next_token_figures(student, windows, batch_size=8)["kl"]

    before = divergence()
    options = {"learning_rates": {"weights": 1e-3}, "gradient_checkpointing": checkpointing, "context": 90}
    losses = dofla.distill_end_to_end(student, windows, steps=15, batch_size=8, progress=False, **options).losses
    assert losses[0].item() == pytest.approx(before, rel=1e-3)
    assert divergence() < 0.9 * before
