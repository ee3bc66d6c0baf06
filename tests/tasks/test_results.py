"""Paired figures, what belongs together, and the table."""

import math
import random
from dataclasses import replace

import pytest

import dofla
from dofla import DoflaError
from dofla.tasks import Metric, TaskResults, TaskScores, compare, evaluate_tasks


def scores(right: list[bool], task: str = "t") -> TaskScores:
    """Two choices an item, of which the first is right."""
    share = sum(right) / len(right)
    error = math.sqrt(share * (1 - share) / (len(right) - 1)) if len(right) > 1 else None
    metric = Metric(share, error, [float(x) for x in right])
    return TaskScores(task, len(right), {"acc": metric}, [[0.0, -1.0 if yes else 1.0] for yes in right])


def test_figures_of_one_task():
    found = compare(scores([n < 80 for n in range(100)]), scores([n < 70 for n in range(100)]))
    assert (found.task, found.items, found.agreement) == ("t", 100, 0.9)
    row = found.metrics["acc"]
    assert (row.original, row.model) == (0.8, 0.7)
    assert row.original_stderr == pytest.approx(math.sqrt(0.8 * 0.2 / 99))
    assert row.difference == pytest.approx(-0.1)
    assert row.difference_stderr == pytest.approx(math.sqrt(0.1 * 0.9 / 99))


def test_pairing_narrows_the_error():
    """Two models right on the same items differ by nothing, whatever items are drawn."""
    right = [random.Random(n).random() < 0.5 for n in range(200)]
    assert compare(scores(right), scores(right)).metrics["acc"].difference_stderr == 0
    other = compare(scores(right), scores(right[::-1])).metrics["acc"]
    assert other.difference == 0
    assert other.difference_stderr > 0.03


def test_one_item_and_no_mean_have_no_error():
    assert compare(scores([True]), scores([False])).metrics["acc"].difference_stderr is None
    bleu = TaskScores("t", 5, {"bleu": Metric(20.0, 1.0)})
    found = compare(bleu, replace(bleu, metrics={"bleu": Metric(18.0, 1.0)}))
    assert (found.metrics["bleu"].difference, found.metrics["bleu"].difference_stderr) == (-2, None)
    assert found.agreement is None


def test_other_items_cannot_be_compared():
    for other in (scores([True, False]), scores([True], task="u")):
        with pytest.raises(DoflaError, match="not the same items"):
            compare(scores([True]), other)


@pytest.fixture(scope="module")
def student(tiny):
    model = tiny.gpt2()
    return dofla.linear.linearize(model, tiny.plan(model, 8))


def test_several_tasks(student, words, make_task, capsys):
    tasks = [make_task("question", count=9), replace(make_task("blank", count=5), name="another")]
    found = evaluate_tasks(student, words, tasks, limit=6, progress=lambda *call: print(*call))
    assert [(task.task, task.items) for task in found.tasks] == [("made_question", 6), ("another", 5)]
    assert capsys.readouterr() == ("33 33 original\n33 33 compressed\n", "")
    assert found.to_dict()["tasks"][0]["metrics"]["acc"].keys() >= {"original", "model", "difference_stderr"}
    assert found.tasks[0].metrics.keys() == {"acc", "acc_norm"}


def test_names_and_limits(student, words, make_task):
    with pytest.raises(DoflaError, match="'made_question' is given twice"):
        evaluate_tasks(student, words, [make_task(), make_task()])
    with pytest.raises(DoflaError, match="limit 0"):
        evaluate_tasks(student, words, [make_task()], limit=0)


def test_the_table_fits_80_columns():
    sides = [scores([n < most for n in range(1000)], task="a_long_name_of_a_task") for most in (999, 1)]
    lines = str(TaskResults([compare(*sides)])).splitlines()
    assert max(map(len, lines)) <= 80
    assert "0.999 ±0.001" in lines[1]
    assert "-0.998 ±0.001" in lines[1]
    assert lines[1].endswith("0 %")
