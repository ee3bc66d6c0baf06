"""Results of ``dofla frontier`` for the page: quality by bytes of state, for each length."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from dofla.report.page import model_title
from dofla.report.runs import naming
from dofla.runs.frontier import ADAPTERS, FRONTIER, Frontier, Point


def is_frontier(folder: str | Path) -> bool:
    """True if ``dofla frontier`` has written the folder."""
    return (Path(folder) / FRONTIER).exists()


def sizes_data(folder: str | Path) -> dict[str, Any]:
    """Everything the page shows of a frontier.

    Raises:
        DoflaError: naming the file, if it is damaged.
    """
    folder, found = Path(folder), Frontier.load(folder)
    with naming(folder):
        sizes = {
            "verdict": found.verdict(),
            "target": found.target,
            "texts": found.evaluated,
            "made": found.made_from,
            "lengths": [_length(found, length, folder) for length in sorted(found.cache)],
        }
        data: dict[str, Any] = {
            "name": folder.resolve().name,
            "model": {"title": model_title(found.model["name"]), **found.model},
            "profile": None,
            "students": [],
            "sizes": sizes,
        }
        json.dumps(data, allow_nan=False)  # the page holds it so
        return data


def _length(found: Frontier, length: int, folder: Path) -> dict[str, Any]:
    """Points of all texts; the ``worst`` of each size, as the target sees it; and the smallest that meets it."""
    own = [_point(x) for x in found.points if x.length == length]
    known = {"length": length, "cache": found.cache[length], "points": own, "student": None}
    known["worst"] = [_point(x) for x in found.at(length)]
    if (point := found.smallest(length)) is not None:
        known["student"] = {**_point(point), "folder": shlex.quote(str(folder / ADAPTERS / str(point.size)))}
    return known


def _point(x: Point) -> dict[str, Any]:
    low, high = x.loss_increase_interval
    kept = {"size": x.size, "bytes": x.bytes, "text": x.text}
    return {**kept, "loss_increase": x.loss_increase, "error": (high - low) / 2, "kl": x.kl}
