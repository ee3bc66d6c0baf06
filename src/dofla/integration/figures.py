"""The few figures of a converted model that stand on its model card, out of the full records that evaluations make."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from dofla.errors import DoflaError
from dofla.storage.fields import build


@dataclass
class Figure:
    """One figure, of the model and, where it has one, of its original."""

    metric: str  # a short name without spaces
    label: str  # what a person reads, with the unit
    model: float
    original: float | None
    source: str  # of the text or task, and how much of it
    command: str  # that measures it again
    interval: list[float] | None = None  # both ends of one of 95 %, if it was measured


def figures_of(record: Mapping[str, Any], command: str) -> list[Figure]:
    """The figures in a record of :func:`dofla.evaluate`, or of tasks. DoflaError if there are none in it, or a part of
    one is missing or of the wrong kind."""
    names = [field.name for field in fields(Figure) if field.name != "command"]
    try:
        rows = [dict(zip(names, row, strict=False)) for row in _rows(record)]
        # A rank correlation of a single pair is NaN, and the loss of a broken model is: nothing to put on a card.
        defined = [row for row in rows if not any(_is_nan(row.get(who)) for who in ("model", "original"))]
        found = [build(Figure, row | {"command": command}, row["metric"]) for row in defined]
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise DoflaError(f"figures are not those of an evaluation ({error}): give what dofla.evaluate made") from error
    if not rows:
        raise DoflaError("figures hold none: give what dofla.evaluate, or `dofla evaluate --out`, made")
    return found


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _rows(record: Mapping[str, Any]) -> Iterator[tuple]:
    text = record.get("source", "")
    if "windows" in record:
        text += f", {record['windows']} windows" + (f" of {record['length']} tokens" if "length" in record else "")
    if language := record.get("language"):
        yield "loss", "next-token loss, nats", language["loss"], language["original_loss"], text
        perplexities = (math.exp(min(language[key], _LARGEST)) for key in ("loss", "original_loss"))
        yield "perplexity", "perplexity", *perplexities, text
        yield (
            "loss_increase",
            "loss increase, nats per token",
            language["loss_increase"],
            None,
            text,
            language["loss_increase_interval"],
        )
        yield "kl", "KL divergence from the original, nats per token", language["kl"], None, text
        yield "agreement", "same likeliest next token, share", language["top1_agreement"], None, text
    if embeddings := record.get("embeddings"):
        yield "cosine", "cosine of embeddings with the original's", embeddings["cosine"], None, text
        yield "spearman", "rank correlation of similarities with the original's", embeddings["spearman"], None, text
    tasks = record.get("tasks", ())  # alone, or beside figures on a text
    for task in tasks.get("tasks", ()) if isinstance(tasks, Mapping) else tasks:
        asked = f"{task['task']}, {task['items']} items"
        for name, both in task["metrics"].items():
            label = "accuracy" if name == "acc" else name
            yield label.replace(", ", "-"), label, both["model"], both["original"], asked


_LARGEST = 300.0
"""Nats, whose exponential is still a number."""
