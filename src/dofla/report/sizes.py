"""What ``dofla frontier`` found, for the page: quality by bytes of state, a line for each length and text."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from dofla.report.page import model_title
from dofla.report.runs import naming
from dofla.runs.frontier import FRONTIER, STUDENTS, Frontier


def is_frontier(folder: str | Path) -> bool:
    """Whether ``dofla frontier`` has written the folder."""
    return (Path(folder) / FRONTIER).exists()


def sizes_data(folder: str | Path) -> dict[str, Any]:
    """Everything the page shows of a frontier.

    Raises:
        DoflaError: naming the file, if it is damaged.
    """
    folder, found = Path(folder), Frontier.load(folder)
    with naming(folder):
        lines = [
            {"length": length, "text": text, "points": _points(found, length, text)}
            for length in sorted(found.cache)
            for text in found.texts
        ]
        sizes = {
            "target": found.target,
            "texts": found.judged,
            "made": found.made_from,
            "lines": [line for line in lines if line["points"]],
            "lengths": [_smallest(found, length, folder) for length in sorted(found.cache)],
        }
        data = {
            "name": folder.resolve().name,
            "model": {"title": model_title(found.model["name"]), **found.model},
            "sliders": None,
            "students": [],
            "sizes": sizes,
        }
        json.dumps(data, allow_nan=False)  # the page holds it so
        return data


def _points(found: Frontier, length: int, text: str) -> list[dict[str, Any]]:
    own = sorted((x for x in found.points if (x.length, x.text) == (length, text)), key=lambda x: x.budget)
    return [{"budget": x.budget, "bytes": x.bytes, "gap": x.gap, "interval": x.gap_interval, "kl": x.kl} for x in own]


def _smallest(found: Frontier, length: int, folder: Path) -> dict[str, Any]:
    known: dict[str, Any] = {"length": length, "cache": found.cache[length], "student": None}
    if (point := found.smallest(length)) is not None:
        known["student"] = {
            "budget": point.budget,
            "bytes": point.bytes,
            "text": point.text,
            "loss": point.loss,
            "folder": shlex.quote(str(folder / STUDENTS / str(point.budget))),
        }
    return known
