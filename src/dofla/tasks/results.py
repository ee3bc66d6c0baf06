"""Two models on the same tasks, metric by metric, and their table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dofla.display import Part, Result, table
from dofla.errors import DoflaError
from dofla.tasks.scores import Metric, TaskScores, standard_error


@dataclass(frozen=True)
class Difference:
    """A metric of teacher and student.

    Attributes:
        teacher, student: its values.
        teacher_stderr, student_stderr: their standard errors, as :class:`Metric` has them.
        difference: student less teacher.
        difference_stderr: standard error of that, paired by item; None if the metric is no mean over items.
    """

    teacher: float
    teacher_stderr: float | None
    student: float
    student_stderr: float | None
    difference: float
    difference_stderr: float | None

    @classmethod
    def of(cls, teacher: Metric, student: Metric) -> Difference:
        """From the same metric of the same items."""
        gains = [b - a for a, b in zip(teacher.values, student.values, strict=False)]
        sides = (teacher.value, teacher.stderr, student.value, student.stderr)
        return cls(*sides, student.value - teacher.value, standard_error(gains))


@dataclass(frozen=True)
class Comparison:
    """Teacher and student on one task.

    Attributes:
        task: its name.
        items: how many.
        metrics: by name.
        agreement: share of items where both choose the same; None if there is nothing to choose from.
    """

    task: str
    items: int
    metrics: dict[str, Difference]
    agreement: float | None = None


@dataclass(frozen=True)
class TaskResults(Result):
    """Teacher and student on several tasks.

    Attributes:
        tasks: one by one; a group of lm-evaluation-harness is one more, after its tasks.
        limit: items per task; None for all.
    """

    tasks: list[Comparison]
    limit: int | None = None

    def parts(self) -> Iterator[Part]:
        """A row for each metric of each task, with standard errors."""
        shown = table("task", "metric", "n", "original", "compressed", "difference", "same", gap=1, widest=16)
        shown.columns[1].justify = "left"
        for task in self.tasks:
            same = "" if task.agreement is None else f"{100 * task.agreement:.0f} %"
            for name, row in task.metrics.items():
                sides = _cell(row.teacher, row.teacher_stderr), _cell(row.student, row.student_stderr)
                difference = _cell(row.difference, row.difference_stderr, "+")
                shown.add_row(task.task, name, str(task.items), *sides, difference, same)
        yield shown


def compare(teacher: TaskScores, student: TaskScores) -> Comparison:
    """Each metric of both, and how they differ; DoflaError if they are not of the same task and items."""
    if (teacher.task, teacher.items, teacher.metrics.keys()) != (student.task, student.items, student.metrics.keys()):
        raise DoflaError(f"{teacher.task} and {student.task} are not the same items: score one task twice")
    metrics = {name: Difference.of(metric, student.metrics[name]) for name, metric in teacher.metrics.items()}
    pairs = list(zip(teacher.chosen, student.chosen, strict=True))
    agreement = sum(a == b for a, b in pairs) / len(pairs) if pairs else None
    return Comparison(teacher.task, teacher.items, metrics, agreement)


def _cell(value: float, stderr: float | None, sign: str = "") -> str:
    return f"{value:{sign}.3f}" + ("" if stderr is None else f" ±{stderr:.3f}")
