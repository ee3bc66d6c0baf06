"""KV heads that hold every token, those that facts are looked up with."""

from __future__ import annotations

import pytest
import torch
from dofla.integration.compressed import compressed_plan
from dofla.plans.head_budgets import HeadBudgets
from sizes import compress, measure_head_budgets

import dofla
from dofla.data.facts import Facts
from dofla.distillation import retrieval
from dofla.distillation.objective import Objective
from dofla.errors import DoflaError
from dofla.integration.student import Student
from dofla.plans.hybrid import HeadCost

FIRST, SECOND = "model.layers.0.self_attn", "model.layers.1.self_attn"
REACH, BUDGET = 192, 32


def reader(tiny, **config):
    """A model with the vocabulary of the demo's tokenizer."""
    return tiny.llama(vocab_size=2048, **config)


def windows(tiny):
    return dofla.TokenWindows.of(tiny.tokens(4, 96))


def places(plan):
    """Tokens that each KV head holds at most."""
    return {(layer.name, head): n for layer in plan.layers for head, n in enumerate(layer.slots_per_head)}


def test_they_hold_every_token_and_the_others_pay(tiny, tokenizer):
    model, tokens, seen = reader(tiny), windows(tiny), []
    options = {"budget": BUDGET, "context": REACH}
    without = measure_head_budgets(model, tokens, **options)
    head_budgets = measure_head_budgets(
        model, tokens, **options, retrieval_heads=1, tokenizer=tokenizer, progress=lambda *x: seen.append(x)
    )
    assert seen[-1][1] == seen[-1][2] == 3 * (4 + 2) + 2  # windows, text that stands twice, both tried; facts
    assert (head_budgets.layers, head_budgets.costs) == (without.layers, without.costs)
    assert not hasattr(model, "_dofla_softmax_implementation")
    ((name, (head,)),) = head_budgets.full_heads.items()
    assert f"KV heads that hold every token: {name} {head}" in str(head_budgets)
    before, plan = (compressed_plan(model, BUDGET, head_budgets=x, context=REACH) for x in (without, head_budgets))
    held, held_before = places(plan), places(before)
    assert held[name, head] == REACH
    others = held.keys() - {(name, head)}
    assert all(held[place] <= held_before[place] for place in others)
    assert plan.state_bytes(model.dtype) <= 4 * BUDGET * HeadCost.of(8, 8, 4).feature
    assert plan.made_by["retrieval_heads"] == head_budgets.full_heads
    student = compress(model, tokens, **options, retrieval_heads=1, tokenizer=tokenizer)
    assert Student.of(student).plan == plan
    assert student.generate(tokens.input_ids[:1, :8], max_new_tokens=4).shape == (1, 12)


def test_what_costs_most_of_text_or_of_facts_comes_first(tiny, tokenizer, monkeypatch):
    model, tokens = reader(tiny), windows(tiny)
    # As much as half of what text costs and nothing of facts; or with twice the bytes a third of what facts cost.
    head_budgets = HeadBudgets({FIRST: [1.0, 1.0], SECOND: [2.0, 1.0]}, {FIRST: [0.5, 0.3], SECOND: [0.2, 0.0]})
    facts = Facts.among(tokens, tokenizer, REACH)
    found = {FIRST: torch.tensor([0.0, 0.1]), SECOND: torch.tensor([0.4, 0.1])}
    asked = []

    def costs(student, parts, report, last):
        asked.append((len(parts), last, Student.of(student).plan.made_by["head_budgets"]))
        return found

    monkeypatch.setattr(retrieval, "costs_of_heads", costs)
    student = dofla.linearize(model, compressed_plan(model, 24, head_budgets=head_budgets))
    order = [(SECOND, 0), (FIRST, 0), (FIRST, 1), (SECOND, 1)]  # 1.0, .5, .4, .1
    for heads in range(1, 5):
        whole = retrieval.with_retrieval_heads(student, head_budgets, heads, facts, lambda: None).full_heads
        assert {(name, head) for name, own in whole.items() for head in own} == set(order[:heads])
        assert list(whole) == sorted(whole)
    assert asked[0] == (2, facts.asked, head_budgets.layers)


def test_only_what_is_asked_counts(tiny):
    model, tokens = tiny.llama().double(), tiny.tokens(2, 32)
    student = dofla.linearize(model, tiny.plan(model, 8))
    batch, whole = {"input_ids": tokens}, Objective(student, lambda: dofla.softmax(student))
    for last in (1, 5, 31, 40):
        part = Objective(student, lambda: dofla.softmax(student), last)
        count = min(last, 31)
        assert part.count(batch) == 2 * count
        with torch.no_grad():
            ours = student(tokens).logits[:, :-1].log_softmax(-1)
            with dofla.softmax(student):
                theirs = student(tokens).logits[:, :-1].log_softmax(-1)
            expected = (theirs.exp() * (theirs - ours)).sum(-1)[:, -count:].mean()
            assert part(batch, 2 * count, 2).item() == pytest.approx(expected.item(), rel=1e-4)
    assert whole.count(batch) == 62
    assert Student.of(student).layers


def test_refusals(tiny, tokenizer, monkeypatch):
    model, tokens = reader(tiny), windows(tiny)

    def refused(message, **options):
        with pytest.raises(DoflaError, match=message):
            compress(model, tokens, **{"budget": 24, "context": REACH, "tokenizer": tokenizer} | options)
        assert not hasattr(model, "_dofla_softmax_implementation")

    refused("retrieval_heads is -1: give how many", retrieval_heads=-1)
    refused("retrieval_heads is 5: the model has 4 KV heads", retrieval_heads=5)
    refused("retrieval_heads is 1: give the tokenizer too", retrieval_heads=1, tokenizer=None)
    refused(
        "4 retrieval heads would take more than 50% of the bytes: give a larger size, fewer of them",
        retrieval_heads=4,
    )
    refused(
        "retrieval_heads is 1: they are found when head budgets are measured", retrieval_heads=1, head_budgets="even"
    )
    monkeypatch.setattr("dofla.integration.compressed.positions_of", lambda _: None)
    refused("states no number of positions: give context", retrieval_heads=1, context=None)
