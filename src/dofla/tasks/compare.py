"""Teacher against student on the same items: per task, and as one figure over all tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dofla.errors import DoflaError
from dofla.tasks.results import Accuracy, Comparison, WinAndTie
from dofla.tasks.scores import METRICS, TaskScores

TOLERANCES = tuple(n / 200 for n in range(61))
"""0 to 0.3 in steps of half a point of accuracy: where the win-and-tie rate is given."""

DRAWS = 2000
"""Bootstrap samples."""

_ROUNDING = 1e-9  # accuracies are fractions: a difference of exactly the tolerance is a tie


@dataclass(frozen=True)
class Pair:
    """The scores of a teacher and its student for the items of one task."""

    teacher: TaskScores
    student: TaskScores

    def __post_init__(self) -> None:
        same = [(s.task, s.ids, s.answers) for s in (self.teacher, self.student)]
        if same[0] != same[1]:
            raise DoflaError(
                f"{self.teacher.task} and {self.student.task} are not the same items: score one task twice"
            )


def compare(teacher: TaskScores, student: TaskScores, *, seed: int = 0) -> Comparison:
    """Both accuracies and how they differ, paired by item.

    Raises:
        DoflaError: if the two were not scored on the same items.
    """
    pair = Pair(teacher, student)
    found = {}
    for metric in METRICS:
        gains = _gains(pair, metric)
        drawn = _resampled(gains, DRAWS, torch.Generator().manual_seed(seed))
        found[metric] = Accuracy(
            teacher=teacher.accuracy(metric),
            teacher_stderr=teacher.stderr(metric),
            student=student.accuracy(metric),
            student_stderr=student.stderr(metric),
            difference=float(gains.mean()),
            difference_interval=_interval(drawn, 0.95).tolist(),
            agreement=agreement(pair, metric),
        )
    scores = {"teacher": teacher.to_dict(), "student": student.to_dict()}
    return Comparison(teacher.task, len(teacher), **found, scores=scores)


def agreement(pair: Pair, metric: str = "acc") -> float:
    """Share of items, 0 to 1, where teacher and student choose the same; DoflaError if ``metric`` is unknown."""
    same = [a == b for a, b in zip(pair.teacher.chosen(metric), pair.student.chosen(metric), strict=True)]
    return sum(same) / len(same)


def win_and_tie(
    pairs: Sequence[Pair],
    metric: str = "acc",
    *,
    tolerances: Sequence[float] = TOLERANCES,
    level: float = 0.95,
    draws: int = DRAWS,
    seed: int = 0,
) -> WinAndTie:
    """On which share of the tasks does the student do as well as its teacher, give or take a tolerance?

    A task counts as won or tied at tolerance τ if the student's accuracy is at least the teacher's less τ. The
    critical tolerance is the smallest τ ≥ 0 at which half the tasks or more are won or tied; it is exact, not a place
    of the grid. (The win-and-tie rate C_α and α* of arXiv 2603.15590, τ being an absolute difference of accuracies.)

    Args:
        pairs: one per task.
        metric: ``acc`` or ``acc_norm``.
        tolerances: where the rate is given.
        level: of the percentile intervals; items are resampled within each task, the same ones for both models.

    Raises:
        DoflaError: if there are no tasks, or ``metric`` is unknown.
    """
    if not pairs:
        raise DoflaError("no tasks to compare: give one or more")
    gains = [_gains(pair, metric) for pair in pairs]
    losses = -torch.stack([gain.mean() for gain in gains])[:, None]  # [tasks, 1]
    generator = torch.Generator().manual_seed(seed)
    drawn = -torch.stack([_resampled(gain, draws, generator) for gain in gains])  # [tasks, draws]
    grid = torch.tensor(tolerances, dtype=losses.dtype)
    return WinAndTie(
        tasks=len(pairs),
        metric=metric,
        tolerances=list(tolerances),
        rate=_rate(losses, grid)[:, 0].tolist(),
        rate_interval=_interval(_rate(drawn, grid), level).T.tolist(),
        critical=float(_critical(losses)),
        critical_interval=_interval(_critical(drawn), level).tolist(),
    )


def average_gain(
    pairs: Sequence[Pair], metric: str = "acc", *, level: float = 0.95, draws: int = DRAWS, seed: int = 0
) -> tuple[float, list[float]]:
    """Mean over tasks of the student's accuracy less the teacher's, and its percentile interval; items are resampled
    within each task, the same ones for both models.

    Raises:
        DoflaError: if there are no tasks, or ``metric`` is unknown.
    """
    if not pairs:
        raise DoflaError("no tasks to compare: give one or more")
    gains = [_gains(pair, metric) for pair in pairs]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.stack([_resampled(gain, draws, generator) for gain in gains]).mean(dim=0)
    return float(torch.stack([gain.mean() for gain in gains]).mean()), _interval(drawn, level).tolist()


def _gains(pair: Pair, metric: str) -> Tensor:
    """Per item [N]: 1 if only the student is right, -1 if only the teacher is, else 0."""
    student, teacher = (torch.tensor(s.correct(metric), dtype=torch.float64) for s in (pair.student, pair.teacher))
    return student - teacher


def _resampled(gains: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """Means [draws] over as many items drawn with replacement. They hold three values only, so it is enough to draw
    how often each comes, which costs nothing for ten thousand items."""
    count = torch.full((draws,), float(len(gains)), dtype=gains.dtype)
    share_won, share_lost = ((gains == value).to(gains.dtype).mean() for value in (1, -1))
    won = torch.binomial(count, share_won.expand(draws).contiguous(), generator=generator)
    of_others = share_lost / (1 - share_won) if share_won < 1 else torch.zeros_like(share_lost)
    lost = torch.binomial(count - won, of_others.clamp(max=1).expand(draws).contiguous(), generator=generator)
    return (won - lost) / len(gains)


def _interval(values: Tensor, level: float) -> Tensor:
    """The middle share ``level`` of the last dimension [..., draws]: its ends [2, ...]."""
    return values.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=values.dtype), dim=-1)


def _rate(losses: Tensor, grid: Tensor) -> Tensor:
    """Share of tasks [T, draws] whose loss [tasks, draws] is within each tolerance [T]."""
    return torch.stack([(losses <= tolerance + _ROUNDING).double().mean(dim=0) for tolerance in grid])


def _critical(losses: Tensor) -> Tensor:
    """The loss [draws] that half the tasks, rounded up, do not exceed; 0 if that is no loss."""
    half = (len(losses) + 1) // 2
    return losses.sort(dim=0).values[half - 1].clamp_min(0)
