"""How many bytes a model needs."""

from __future__ import annotations

import pytest

import dofla
from dofla.errors import DoflaError
from dofla.integration.surgery import plan_of
from dofla.runs.frontier import Frontier, Point, _between


def windows(tiny, count, length, seed=0):
    return dofla.TokenWindows.of(tiny.tokens(count, length, seed=seed))


def points(gaps, length=64):
    return [Point(budget, 100 * budget, length, gap, [gap, gap], gap) for budget, gap in gaps.items()]


def test_every_budget_is_judged_at_every_length(tiny):
    model, tokens = tiny.llama(), windows(tiny, 3, 64)
    judged = [windows(tiny, 2, length, seed=length) for length in (40, 80)]
    seen = []
    found = dofla.frontier(model, tokens, judged, budgets=[24, 12], progress=lambda *report: seen.append(report))
    assert [(x.budget, x.length) for x in found.points] == [(12, 40), (12, 80), (24, 40), (24, 80)]
    assert seen == [("budgets", 1, 2), ("budgets", 2, 2)]
    assert not hasattr(model, "_dofla_softmax_implementation")
    student = dofla.fade(model, tokens, budget=12)
    for point, one in zip(found.at(40)[:1], judged, strict=False):
        result = dofla.evaluate(student, one)
        assert (point.gap, point.kl, point.bytes) == (result.gap, result.kl, plan_of(student).state_bytes(model.dtype))
    assert found.cache == {length: plan_of(student).softmax_bytes(length, model.dtype) for length in (40, 80)}
    assert found.smallest(40) is None


def test_with_a_target_it_stops_where_it_is_met(tiny):
    tokens, judged = windows(tiny, 3, 64), [windows(tiny, 2, 64, seed=9)]
    (only,) = dofla.frontier(tiny.llama(), tokens, judged, budgets=[12, 24, 48], target=100.0).points
    assert only.budget == 12


@pytest.mark.parametrize(
    ("gaps", "budget"),
    [
        ({16: 0.16, 64: 0.01}, 46),  # 16 · 4^(log 8 / log 16)
        ({16: 0.08, 64: -0.01}, 23),  # as if a hundredth of the target: 16 · 4^(log 4 / log 400)
        ({16: 0.08, 32: 0.02, 64: 0.005}, None),  # 32 just meets it
        ({16: 0.16, 17: 0.01}, None),
        ({16: 0.01, 64: 0.001}, None),
        ({16: 0.5, 64: 0.1}, None),
    ],
)
def test_between_two_budgets_it_tries_the_one_that_should_meet_the_target(gaps, budget):
    assert _between(points(gaps), 0.02) == budget


def test_what_is_said_of_the_smallest():
    found = Frontier(points({16: 0.3, 64: 0.01}) + points({16: 0.5, 64: 0.2}, 128), {64: 10**6, 128: 2 * 10**6}, 0.02)
    assert found.smallest(64).budget == 64
    assert found.smallest(128) is None
    text = str(found)
    assert "within 0.02 at 64 tokens: 6.2 KiB: dofla fade --budget 64" in text
    assert "within 0.02 at 128 tokens: none tried" in text


def test_bad_input(tiny):
    model, tokens = tiny.llama(), windows(tiny, 2, 32)
    with pytest.raises(DoflaError, match=r"windows of \[32, 32\] tokens: give one budget or more, and one set"):
        dofla.frontier(model, tokens, [tokens, tokens])
    with pytest.raises(DoflaError, match="target is 0: give a gap above 0"):
        dofla.frontier(model, tokens, [tokens], target=0)
