"""Figures over several tasks: the critical tolerance, and gains resampled by item."""

import pytest

from dofla.paper.accuracy import _critical, _difference
from dofla.tasks import Metric, TaskScores


def scores(right: int, items: int = 100) -> TaskScores:
    return TaskScores("t", items, {"acc": Metric(right / items, None, [float(n < right) for n in range(items)])})


@pytest.mark.parametrize(
    ("students", "critical"),
    [((90, 80, 10), 0), ((79, 78, 77), 0.02), ((80,), 0), ((75,), 0.05), ((85, 78, 75, 60), 0.02)],
)
def test_half_of_the_tasks_is_rounded_up(students, critical):
    found = _critical([scores(80)] * len(students), [scores(student) for student in students])
    assert found == pytest.approx(critical)


def test_one_original_is_compared_with_every_seed():
    fixed = [[scores(50), scores(60)], [scores(52), scores(60)]]
    gain, interval = _difference(fixed, [[scores(70), scores(60)]])
    assert gain.mean == pytest.approx((0.2 + 0 + 0.18 + 0) / 4)
    low, high = map(float, interval.split(" to "))
    assert low < gain.mean < high
