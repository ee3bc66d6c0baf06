"""Results of a comparison of teacher and student on tasks, and their tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from dofla.display import Part, Result, table
from dofla.tasks.scores import METRICS

_WIDTH, _PLACES = 24, 7  # of the bars of the win-and-tie rate, and how many


@dataclass(frozen=True)
class Accuracy:
    """Teacher and student by one metric, paired by item.

    Attributes:
        teacher, student: accuracy, 0 to 1.
        teacher_stderr, student_stderr: of the mean, as :meth:`TaskScores.stderr`.
        difference: student less teacher.
        difference_interval: of 95 %, bootstrap over items.
        agreement: share of items where both choose the same.
    """

    teacher: float
    teacher_stderr: float
    student: float
    student_stderr: float
    difference: float
    difference_interval: list[float]
    agreement: float


@dataclass(frozen=True)
class Comparison(Result):
    """Teacher and student on one task.

    Attributes:
        task: its name.
        items: how many.
        acc, acc_norm: by either of :data:`METRICS`.
        scores: all that ``teacher`` and ``student`` were scored with.
    """

    task: str
    items: int
    acc: Accuracy
    acc_norm: Accuracy
    scores: dict[str, Any] = field(repr=False)

    def parts(self) -> Iterator[Part]:
        """A row by each metric."""
        for metric in METRICS:
            yield _table([self], metric)


@dataclass(frozen=True)
class WinAndTie(Result):
    """On which share of the tasks the student does as well as its teacher, give or take a tolerance.

    Attributes:
        tasks: how many.
        metric: one of :data:`METRICS`.
        tolerances, rate: [T] each.
        rate_interval: both ends of each, [T, 2].
        critical: the smallest tolerance at which half the tasks are won or tied.
        critical_interval: both its ends.
    """

    tasks: int
    metric: str
    tolerances: list[float]
    rate: list[float]
    rate_interval: list[list[float]]
    critical: float
    critical_interval: list[float]

    @property
    def line(self) -> str:
        """The critical tolerance, in points of accuracy."""
        low, high = (100 * end for end in self.critical_interval)
        many = "the task is" if self.tasks == 1 else f"half of {self.tasks} tasks are"
        return f"{many} won or tied at a tolerance of {100 * self.critical:.1f} points [{low:.1f}, {high:.1f}]"

    def parts(self) -> Iterator[Part]:
        """The rate at some of the tolerances, the last one where nothing changes any more."""
        curve = list(zip(self.tolerances, self.rate, strict=True))
        last = next((n for n, (_, rate) in enumerate(curve) if rate == curve[-1][1]), 0)
        shown = table("tolerance", "won or tied", "", gap=1)
        shown.columns[0].justify, shown.columns[-1].justify = "right", "left"
        for n in sorted({round(n * last / (_PLACES - 1)) for n in range(_PLACES)}):
            tolerance, rate = curve[n]
            bar = Text("━" * round(_WIDTH * rate), style="cyan")
            shown.add_row(f"{100 * tolerance:.1f}", f"{100 * rate:.0f} %", bar)
        yield shown


@dataclass(frozen=True)
class TaskResults(Result):
    """Teacher and student on several tasks.

    Attributes:
        tasks: one by one.
        win_and_tie: over all of them, by metric.
        limit: items per task; None for all.
    """

    tasks: list[Comparison]
    win_and_tie: dict[str, WinAndTie]
    limit: int | None = None

    def parts(self) -> Iterator[Part]:
        """Tasks one by one, by each metric, and the win-and-tie rate over them."""
        for metric, rates in self.win_and_tie.items():
            yield ""
            yield _table(self.tasks, metric)
            yield rates.line
        yield ""
        yield from self.win_and_tie["acc"].parts()


def _table(tasks: Sequence[Comparison], metric: str) -> Table:
    """One row per task, accuracies in percent."""
    shown = table(metric, "n", "teacher", "student", "difference (95 %)", "same", gap=1, widest=16)
    for task in tasks:
        row = getattr(task, metric)
        low, high = (100 * end for end in row.difference_interval)
        shown.add_row(
            task.task,
            str(task.items),
            f"{100 * row.teacher:.1f} ±{100 * row.teacher_stderr:.1f}",
            f"{100 * row.student:.1f} ±{100 * row.student_stderr:.1f}",
            f"{100 * row.difference:+.1f} [{low:+.1f}, {high:+.1f}]",
            f"{100 * row.agreement:.0f} %",
        )
    return shown
