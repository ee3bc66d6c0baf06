"""Scores of one model on one task, metric by metric."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Metric:
    """A figure of a task.

    Attributes:
        value: over all items.
        stderr: its standard error; None of a single item, or where lm-evaluation-harness gives none.
        values: of the items, if ``value`` is their mean; else empty.
    """

    value: float
    stderr: float | None
    values: list[float] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class TaskScores:
    """The metrics of one model on one task, or on a group of tasks.

    Attributes:
        task: its name.
        items: how many.
        metrics: by name, as lm-evaluation-harness reports them: ``acc``, ``acc_norm``, ``exact_match``, ...
        logprobs: of a multiple-choice task, natural log-likelihood of each choice of each item; else empty.
    """

    task: str
    items: int
    metrics: dict[str, Metric]
    logprobs: list[list[float]] = field(default_factory=list, repr=False)

    @property
    def chosen(self) -> list[int]:
        """The likeliest choice of each item, the first of equals."""
        return [max(range(len(values)), key=values.__getitem__) for values in self.logprobs]


def standard_error(values: Sequence[float]) -> float | None:
    """The standard error of the mean of values; None for fewer than two."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
