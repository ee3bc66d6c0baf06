"""Sizes of a compressed cache."""

from __future__ import annotations

import re

import pytest
from by_budget import size_of
from dofla.integration.compressed import budget_of, compressed_plan
from dofla.plans.size import parse_size, size_or_ratio

import dofla
from dofla.errors import DoflaError
from dofla.integration.student import Student


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1.5MiB", 1_572_864),
        ("1.5 mib", 1_572_864),
        ("800KiB", 819_200),
        (" 1GiB ", 2**30),
        ("2MB", 2_000_000),
        ("2.5 KB", 2_500),
        (".5GB", 500_000_000),
        ("700", 700),
        ("700B", 700),
        (1234, 1234),
    ],
)
def test_sizes_are_read(text, count):
    assert parse_size(text) == count


@pytest.mark.parametrize(
    "size", ["", "big", "1.5", "-3MiB", "1.5.2MiB", "3 TiB", "MiB", 0, -1, "9" * 400, True, 1.5, None, "0KiB", 2**60]
)
def test_other_forms_are_refused(size):
    if size == "1.5":
        assert parse_size(size) == 2
        return
    with pytest.raises(DoflaError, match=re.escape(f"size is {size!r}: give ")):
        parse_size(size)


def test_a_ratio_is_of_the_cache_at_the_context():
    assert size_or_ratio(None, None, 16_000, "It") == 1_000
    assert size_or_ratio(None, 10, 16_000, "It") == 1_600
    assert size_or_ratio("3KB", None, None, "It") == 3_000
    for size, ratio, cache, words in [
        ("3KB", 16, 16_000, "size is '3KB' and ratio is 16: give one of them"),
        (None, 1, 16_000, "ratio is 1: give softmax bytes per compressed byte, above 1"),
        (None, 16, None, "It states no number of positions: give context, or size instead of a ratio"),
    ]:
        with pytest.raises(DoflaError, match=words):
            size_or_ratio(size, ratio, cache, "It")


def test_the_bytes_of_a_budget_make_the_plan_of_that_budget(tiny):
    for model in (tiny.llama(), tiny.gpt2(), tiny.llama(head_dim=32)):
        for budget in (12, 64, 37):
            assert budget_of(model, size_of(model, budget)) == budget
            dofla.compress(model, tiny.tokens(2, 32), size_of(model, budget), head_budgets="even")
            plan = Student.of(model).plan
            assert plan == compressed_plan(dofla.restore(model), budget)
            assert plan.made_by == {"strategy": "compressed", "size": size_of(model, budget)}


def test_ratio_and_context_of_a_model(tiny):
    model = tiny.llama()  # 256 positions; 2 layers of 2 KV heads of 8
    cached = 2 * 2 * 2 * 8 * 2
    for options, size in [
        ({}, 256 * cached / 16),
        ({"ratio": 8}, 256 * cached / 8),
        ({"ratio": 4, "context": 100}, 25 * cached),
        ({"size": "3KB", "context": 100}, 3_000),
        ({"ratio": 8, "keep_softmax": ["model.layers.0.self_attn"]}, 256 * cached / 2 / 8),
    ]:
        kept = options.get("keep_softmax", ())
        assert budget_of(model, **options) * size_of(model, 1, kept) == pytest.approx(size)
        plan = Student.of(dofla.compress(model, tiny.tokens(2, 32), head_budgets="even", **options)).plan
        assert plan.made_by["size"] == round(size)
        assert 0.9 * size < plan.state_bytes(model.dtype) <= size
        dofla.restore(model)


@pytest.mark.parametrize("head_budgets", ["even", "measured"])
def test_the_size_that_an_error_names_works(tiny, head_budgets):
    model, tokens = tiny.llama(), tiny.tokens(2, 64)
    with pytest.raises(DoflaError, match=r"size 300 bytes is too small") as refusal:
        dofla.compress(model, tokens, 300, head_budgets=head_budgets)
    (least,) = re.findall(r"give (\d+) bytes", str(refusal.value))
    dofla.restore(dofla.compress(model, tokens, int(least), head_budgets=head_budgets))
    with pytest.raises(DoflaError, match="is too small"):
        dofla.compress(model, tokens, int(least) - size_of(model, 1), head_budgets=head_budgets)
