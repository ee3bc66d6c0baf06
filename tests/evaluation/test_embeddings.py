"""Sentence embeddings and rank correlation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dofla
from dofla.data import as_windows
from dofla.evaluation.embeddings import embedding_figures, spearman

numbers = st.lists(st.integers(-1000, 1000), min_size=2, max_size=30, unique=True)


@settings(max_examples=25, derandomize=True)
@given(x=numbers, seed=st.integers(0, 1000))
def test_spearman_is_the_textbook_formula(x, seed):
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).tolist()
    y = [x[place] ** 3 for place in order]
    ranks = [[sorted(values).index(value) for value in values] for values in (x, y)]
    squares = sum((a - b) ** 2 for a, b in zip(*ranks, strict=True))
    expected = 1 - 6 * squares / (len(x) * (len(x) ** 2 - 1))
    got = spearman(x, y)
    assert got == pytest.approx(expected, abs=1e-9)
    # Ranks 0 1 2 3 and 0.5 0.5 2 3: 4.5 / √(5 · 4.5)
    assert spearman([1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 2.0, math.inf]) == pytest.approx(4.5 / math.sqrt(22.5))


def pooled(model, batch):
    """Mean over the real tokens, normalized, one text at a time."""
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch.get("attention_mask", torch.ones(hidden.shape[:2])).bool()
    means = torch.stack([h[m].mean(dim=0) for h, m in zip(hidden, mask, strict=True)])
    return means / means.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("kind", ["bert", "vit"])
@pytest.mark.parametrize("batch_size", [2, 32])
def test_figures_compare_mean_pooled_embeddings(tiny, kind, batch_size):
    model = getattr(tiny, kind)()
    batch = tiny.padded(7, 14) if kind == "bert" else tiny.images(7)
    teacher = pooled(model, batch)
    dofla.linear.linearize(model, tiny.plan(model))
    student = pooled(model, batch)
    figures = embedding_figures(model, as_windows(batch), batch_size=batch_size)
    assert figures["cosine"] == pytest.approx((teacher * student).sum(-1).mean().item(), abs=1e-5)
    assert figures["cosine"] < 0.999
    pairs = [(i, j) for i in range(7) for j in range(i + 1, 7)]
    similarities = [torch.tensor([(e[i] @ e[j]).item() for i, j in pairs]) for e in (teacher, student)]
    assert figures["spearman"] == pytest.approx(spearman(*similarities), abs=0.01)
