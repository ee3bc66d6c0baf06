"""Scores of a model on a task: log-likelihoods per choice, and the accuracies that follow from them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from dofla.errors import check_choice

METRICS = ("acc", "acc_norm")
"""Choose the likeliest continuation, or the one with the largest log-likelihood per character."""


@dataclass(frozen=True)
class TaskScores:
    """The choices of N items, scored by one model.

    Attributes:
        task: its name.
        ids: of the items [N].
        answers: index of the right choice of each item [N].
        logprobs: natural log-likelihood of each choice, summed over its tokens; one list per item.
        lengths: characters of each choice, the space in front of it not counted.
    """

    task: str
    ids: list[int | str]
    answers: list[int]
    logprobs: list[list[float]]
    lengths: list[list[int]]

    def __len__(self) -> int:
        return len(self.answers)

    def chosen(self, metric: str = "acc") -> list[int]:
        """The index of the choice the model makes for each item, the first of equals."""
        check_choice("metric", metric, METRICS)
        picks = []
        for values, lengths in zip(self.logprobs, self.lengths, strict=True):
            ranked = values if metric == "acc" else [v / n for v, n in zip(values, lengths, strict=True)]
            picks.append(max(range(len(ranked)), key=ranked.__getitem__))
        return picks

    def correct(self, metric: str = "acc") -> list[bool]:
        """True if each choice made is the right one."""
        return [pick == answer for pick, answer in zip(self.chosen(metric), self.answers, strict=True)]

    def accuracy(self, metric: str = "acc") -> float:
        """Share of items answered rightly."""
        return sum(self.correct(metric)) / len(self)

    def stderr(self, metric: str = "acc") -> float:
        """Standard error of :meth:`accuracy`, √(p (1 − p) / (N − 1)); NaN for one item."""
        share = self.accuracy(metric)
        return math.sqrt(share * (1 - share) / (len(self) - 1)) if len(self) > 1 else math.nan

    def to_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self) | {f"chosen_{metric}": self.chosen(metric) for metric in METRICS}
