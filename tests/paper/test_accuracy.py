"""Figures over several tasks: the critical tolerance, and gains resampled by item."""

import pytest
import torch

from dofla.paper.accuracy import _critical, _difference, _resampled
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


def test_resampled_gains_are_those_of_items_drawn_with_replacement():
    gains = torch.tensor([1.0] * 10 + [-1.0] * 30 + [0.0] * 60, dtype=torch.float64)
    found = _resampled(gains, torch.Generator().manual_seed(0))
    chosen = torch.randint(100, (2000, 100), generator=torch.Generator().manual_seed(1))
    direct = gains[chosen].mean(dim=1)
    assert found.mean() == pytest.approx(-0.2, abs=0.005)
    assert found.std() == pytest.approx(direct.std().item(), rel=0.1)
    assert not _resampled(torch.zeros(5, dtype=torch.float64), torch.Generator()).any()
    assert (_resampled(torch.ones(5, dtype=torch.float64), torch.Generator()) == 1).all()


def test_one_original_is_compared_with_every_seed():
    fixed = [[scores(50), scores(60)], [scores(52), scores(60)]]
    gain, interval = _difference(fixed, [[scores(70), scores(60)]])
    assert gain.mean == pytest.approx((0.2 + 0 + 0.18 + 0) / 4)
    low, high = map(float, interval.split(" to "))
    assert low < gain.mean < high
