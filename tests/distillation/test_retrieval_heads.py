"""KV heads that hold every token, those that facts are looked up with."""

from __future__ import annotations

import pytest
import torch

import dofla
from dofla.data.facts import Facts
from dofla.distillation import retrieval
from dofla.distillation.objective import Objective
from dofla.errors import DoflaError
from dofla.integration.fading import fading_plan
from dofla.integration.surgery import linear_layers, plan_of
from dofla.plans.hybrid import HeadCost
from dofla.plans.shares import Shares

FIRST, SECOND = "model.layers.0.self_attn", "model.layers.1.self_attn"
REACH, BUDGET = 192, 32


def reader(tiny, **config):
    """A model with the vocabulary of the demo's tokenizer."""
    return tiny.llama(vocab_size=2048, **config)


def windows(tiny):
    return dofla.TokenWindows.of(tiny.tokens(4, 96))


def places(plan):
    """Tokens that each KV head holds at most."""
    return {(layer.name, head): n for layer in plan.layers for head, n in enumerate(layer.places_per_head)}


def test_they_hold_every_token_and_the_others_pay(tiny, tokenizer):
    model, tokens, seen = reader(tiny), windows(tiny), []
    options = {"budget": BUDGET, "reach": REACH}
    without = dofla.measure_shares(model, tokens, **options)
    shares = dofla.measure_shares(
        model, tokens, **options, retrieval_heads=1, tokenizer=tokenizer, progress=lambda *x: seen.append(x)
    )
    assert seen[-1][1] == seen[-1][2] == 3 * (4 + 2) + 2  # windows, text that stands twice, both tried; facts
    assert (shares.layers, shares.costs) == (without.layers, without.costs)
    assert not hasattr(model, "_dofla_softmax_implementation")
    ((name, (head,)),) = shares.whole.items()
    assert f"KV heads that hold every token: {name} {head}" in str(shares)
    before, plan = (fading_plan(model, BUDGET, shares=x, reach=REACH) for x in (without, shares))
    held, held_before = places(plan), places(before)
    assert held[name, head] == REACH
    others = held.keys() - {(name, head)}
    assert all(held[place] <= held_before[place] for place in others)
    assert plan.state_bytes(model.dtype) <= 4 * BUDGET * HeadCost.of(8, 8, 4).feature
    assert plan.made_by["retrieval_heads"] == shares.whole
    student = dofla.fade(model, tokens, **options, retrieval_heads=1, tokenizer=tokenizer)
    assert plan_of(student) == plan
    assert student.generate(tokens.input_ids[:1, :8], max_new_tokens=4).shape == (1, 12)


def test_what_costs_most_of_text_or_of_facts_comes_first(tiny, tokenizer, monkeypatch):
    model, tokens = reader(tiny), windows(tiny)
    # As much as half of what text costs and nothing of facts; or with twice the bytes a third of what facts cost.
    shares = Shares({FIRST: [1.0, 1.0], SECOND: [2.0, 1.0]}, {FIRST: [0.5, 0.3], SECOND: [0.2, 0.0]})
    facts = Facts.among(tokens, tokenizer, REACH)
    found = {FIRST: torch.tensor([0.0, 0.1]), SECOND: torch.tensor([0.4, 0.1])}
    asked = []

    def costs(student, parts, report, last):
        asked.append((len(parts), last, plan_of(student).made_by["shares"]))
        return found

    monkeypatch.setattr(retrieval, "costs_of_heads", costs)
    student = dofla.linearize(model, fading_plan(model, 24, shares=shares))
    order = [(SECOND, 0), (FIRST, 0), (FIRST, 1), (SECOND, 1)]  # 1.0, .5, .4, .1
    for heads in range(1, 5):
        whole = retrieval.with_retrieval_heads(student, shares, heads, facts, lambda: None).whole
        assert {(name, head) for name, own in whole.items() for head in own} == set(order[:heads])
        assert list(whole) == sorted(whole)
    assert asked[0] == (2, facts.asked, shares.layers)


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
    assert linear_layers(student)


def test_refusals(tiny, tokenizer, monkeypatch):
    model, tokens = reader(tiny), windows(tiny)

    def refused(message, **options):
        with pytest.raises(DoflaError, match=message):
            dofla.fade(model, tokens, **{"budget": 24, "reach": REACH, "tokenizer": tokenizer} | options)
        assert not hasattr(model, "_dofla_softmax_implementation")

    refused("retrieval_heads is -1: give how many", retrieval_heads=-1)
    refused("retrieval_heads is 5: the model has 4 KV heads", retrieval_heads=5)
    refused("retrieval_heads is 1: give the tokenizer too", retrieval_heads=1, tokenizer=None)
    refused(
        "4 of the KV heads to hold every token would take more than 50% of the bytes: give more, fewer of them",
        retrieval_heads=4,
    )
    refused("retrieval_heads is 1: they are found when shares are measured", retrieval_heads=1, shares="even")
    monkeypatch.setattr("dofla.integration.fading.positions_of", lambda _: None)
    refused("any number of positions: say by reach how many heads are to hold", retrieval_heads=1, reach=None)
