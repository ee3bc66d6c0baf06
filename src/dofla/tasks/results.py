"""Two models on the same tasks, metric by metric, and their table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dofla.display import Part, Result, table
from dofla.errors import DoflaError
from dofla.tasks.scores import Metric, TaskScores, standard_error


@dataclass(frozen=True)
class Difference:
    """A metric of original and converted model.

    Attributes:
        original, model: its values.
        original_stderr, model_stderr: their standard errors, as :class:`Metric` has them.
        difference: model less original.
        difference_stderr: standard error of that, paired by item; None if the metric is no mean over items.
    """

    original: float
    original_stderr: float | None
    model: float
    model_stderr: float | None
    difference: float
    difference_stderr: float | None

    @classmethod
    def of(cls, original: Metric, model: Metric) -> Difference:
        """From the same metric of the same items."""
        gains = [b - a for a, b in zip(original.values, model.values, strict=False)]
        sides = (original.value, original.stderr, model.value, model.stderr)
        return cls(*sides, model.value - original.value, standard_error(gains))


@dataclass(frozen=True)
class Comparison:
    """Original and converted model on one task.

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
    """Original and converted model on several tasks.

    Attributes:
        tasks: one by one; a group of lm-evaluation-harness is one more, after its tasks.
        limit: items per task; None for all.
        contexts: length and text of those of RULER's tasks.
    """

    tasks: list[Comparison]
    limit: int | None = None
    contexts: str | None = None

    def parts(self) -> Iterator[Part]:
        """A row for each metric of each task, with standard errors."""
        shown = table("task", "metric", "n", "original", "compressed", "difference", "same", gap=1, widest=16)
        shown.columns[1].justify = "left"
        for task in self.tasks:
            same = "" if task.agreement is None else f"{100 * task.agreement:.0f} %"
            for name, row in task.metrics.items():
                sides = _cell(row.original, row.original_stderr), _cell(row.model, row.model_stderr)
                difference = _cell(row.difference, row.difference_stderr, "+")
                shown.add_row(task.task, name, str(task.items), *sides, difference, same)
        yield from filter(None, (shown, self.contexts))


def compare(original: TaskScores, model: TaskScores) -> Comparison:
    """Each metric of both, and how they differ; DoflaError if they are not of the same task and items."""
    if (original.task, original.items, original.metrics.keys()) != (model.task, model.items, model.metrics.keys()):
        raise DoflaError(f"{original.task} and {model.task} are not the same items: score one task twice")
    metrics = {name: Difference.of(metric, model.metrics[name]) for name, metric in original.metrics.items()}
    pairs = list(zip(original.chosen, model.chosen, strict=True))
    agreement = sum(a == b for a, b in pairs) / len(pairs) if pairs else None
    return Comparison(original.task, original.items, metrics, agreement)


def _cell(value: float, stderr: float | None, sign: str = "") -> str:
    return f"{value:{sign}.3f}" + ("" if stderr is None else f" ±{stderr:.3f}")
