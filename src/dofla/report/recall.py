"""Recall by the distance between where something was told and where it is asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_NEAREST = 1 / 16
"""Share of a context that lies between the question and what was told last, on average of the last depth's bin."""


def by_distance(recall: dict[str, Any]) -> list[dict[str, Any]]:
    """Recall of both models at distances of about 16, 32, 64, ... tokens, the nearest first.

    Args:
        recall: ``text`` and ``records`` of :func:`dofla.evaluation.probe.probe`. The length of a record of *villagers*
            is the distance; elsewhere it follows from length and depth.

    Returns:
        For each distance ``distance``, ``n`` (questions), ``chance``, and ``teacher`` and ``student``: shares of right
        answers among the choices.
    """
    found: dict[int, list[dict[str, Any]]] = {}
    for record in recall["records"]:
        near = 1 if recall["text"] == "villagers" else max(1 - record["depth"], _NEAREST)
        distance = 2 ** max(4, round(math.log2(record["length"] * near)))
        found.setdefault(distance, []).append(record)
    return [{"distance": distance, **_means(records)} for distance, records in sorted(found.items())]


def _means(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    total = sum(x["n"] for x in records)

    def mean(value) -> float:
        return round(sum(value(x) * x["n"] for x in records) / total, 4)

    accuracies = {who: mean(lambda x, who=who: x[who]["accuracy"]) for who in ("teacher", "student")}
    return {"n": total, "chance": mean(lambda x: x["chance"]), **accuracies}


def forgets_from(points: Sequence[dict[str, Any]]) -> int | None:
    """The distance from which on the student recalls less than half of what the teacher does, both beyond chance; None
    if it recalls more at the largest distance at which the teacher recalls anything."""
    lost = None
    for point in reversed(points):
        able, found = (point[who] - point["chance"] for who in ("teacher", "student"))
        if able < point["chance"]:
            continue
        if found >= able / 2:
            break
        lost = point["distance"]
    return lost
