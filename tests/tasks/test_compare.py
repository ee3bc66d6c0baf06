"""Paired figures, the win-and-tie rate, its critical tolerance, and the whole record."""

from __future__ import annotations

import math
import random

import pytest

import dofla
from dofla import DoflaError
from dofla.tasks import Pair, TaskResults, TaskScores, compare, evaluate_tasks, win_and_tie


def scores(right: list[bool], task: str = "t") -> TaskScores:
    """Two choices an item, of which the first is right."""
    count = len(right)
    return TaskScores(
        task, list(range(count)), [0] * count, [[0.0, -1.0 if yes else 1.0] for yes in right], [[1, 1]] * count
    )


def pair(teacher: int, student: int, items: int = 100, task: str = "t") -> Pair:
    """So many right of ``items`` each, the student's among the teacher's as far as they go."""
    return Pair(scores([n < teacher for n in range(items)], task), scores([n < student for n in range(items)], task))


def test_figures_of_one_task():
    one = pair(80, 70)
    figures = compare(one.teacher, one.student)
    assert figures.task == "t"
    assert figures.items == 100
    row = figures.acc
    assert (row.teacher, row.student) == (0.8, 0.7)
    assert row.difference == pytest.approx(-0.1)
    assert row.agreement == 0.9
    assert row.teacher_stderr == pytest.approx(math.sqrt(0.8 * 0.2 / 99))
    low, high = row.difference_interval
    # A binomial of 100 draws with share 0.1 has standard deviation 3.
    assert -0.18 < low < -0.13
    assert -0.07 < high < -0.02
    assert figures.acc_norm == row


def test_pairing_narrows_the_interval():
    """Two models right on the same items differ by nothing, whatever items are drawn."""
    rng = random.Random(0)
    right = [rng.random() < 0.5 for _ in range(200)]
    same = compare(scores(right), scores(right)).acc
    assert same.difference_interval == [0, 0]
    shuffled = rng.sample(right, len(right))
    other = compare(scores(right), scores(shuffled)).acc
    assert other.difference == 0
    assert other.difference_interval[0] < -0.05


def test_rate_and_critical_tolerance_by_hand():
    pairs = [pair(80, 85), pair(80, 78), pair(80, 75), pair(80, 60)]
    found = win_and_tie(pairs, tolerances=[0, 0.02, 0.05, 0.1, 0.2])
    assert found.rate == [0.25, 0.5, 0.75, 0.75, 1.0]
    assert found.critical == pytest.approx(0.02)
    assert found.rate == sorted(found.rate)
    for rate, (low, high) in zip(found.rate, found.rate_interval, strict=True):
        assert 0 <= low <= rate <= high <= 1
    low, high = found.critical_interval
    assert 0 <= low <= found.critical <= high


@pytest.mark.parametrize(("students", "critical"), [((90, 80, 10), 0), ((79, 78, 77), 0.02), ((80,), 0), ((75,), 0.05)])
def test_half_of_the_tasks_is_rounded_up(students, critical):
    found = win_and_tie([pair(80, student) for student in students])
    assert found.critical == pytest.approx(critical)
    at = min(n for n, rate in enumerate(found.rate) if rate >= 0.5)
    assert found.tolerances[at] == pytest.approx(critical)


def test_more_items_narrow_the_interval():
    def width(items: int) -> float:
        many = [pair(8 * items // 10, 7 * items // 10, items) for _ in range(3)]
        low, high = win_and_tie(many).critical_interval
        return high - low

    assert width(2000) < width(100) / 2


def test_the_same_seed_gives_the_same_intervals():
    pairs = [pair(8000, 7000, 9001), pair(5000, 4800, 9001)]
    assert win_and_tie(pairs, seed=1) == win_and_tie(pairs, seed=1)
    assert win_and_tie(pairs, seed=1) != win_and_tie(pairs, seed=2)


def test_other_items_cannot_be_compared():
    with pytest.raises(DoflaError, match="not the same items"):
        compare(scores([True]), scores([True, False]))
    with pytest.raises(DoflaError, match="not the same items"):
        compare(scores([True]), scores([True], task="u"))
    with pytest.raises(DoflaError, match="no tasks"):
        win_and_tie([])
    with pytest.raises(DoflaError, match="'f1'"):
        win_and_tie([pair(1, 1)], "f1")


@pytest.fixture(scope="module")
def student(tiny):
    model = tiny.gpt2()
    return dofla.linearize(model, tiny.plan(model, 8))


def test_a_record_of_several_tasks(student, words, make_task):
    from dataclasses import replace

    first, second = make_task("question", count=9), replace(make_task("blank", count=5), name="another")
    calls = []
    found = evaluate_tasks(
        student, words, [first, second], limit=6, progress=lambda done, total, task: calls.append((done, total, task))
    )
    assert [task.task for task in found.tasks] == ["made_question", "another"]
    assert [task.items for task in found.tasks] == [6, 5]
    assert calls[-1] == (22, 22, "another")
    kept = found.tasks[0].scores
    assert len(kept["student"]["chosen_acc"]) == 6
    assert kept["teacher"]["logprobs"] != kept["student"]["logprobs"]
    assert set(found.win_and_tie) == {"acc", "acc_norm"}
    assert found.win_and_tie["acc"].tasks == 2


def test_names_and_limits(student, words, make_task):
    with pytest.raises(DoflaError, match="'made_question' is given twice"):
        evaluate_tasks(student, words, [make_task(), make_task()])
    with pytest.raises(DoflaError, match="limit 0"):
        evaluate_tasks(student, words, [make_task()], limit=0)


def test_tables_fit_80_columns():
    pairs = [pair(999, 1, 1000, task=f"a_long_name_of_a_task_{n}") for n in range(3)]
    found = TaskResults([compare(p.teacher, p.student) for p in pairs], {"acc": win_and_tie(pairs)})
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert "99.9 ±0.1" in lines[2]
    assert "99.8 points" in lines[5]
    assert lines[-1].split() == ["0.0", "0", "%"]
