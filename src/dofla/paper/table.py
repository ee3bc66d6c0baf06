"""Table: rows of text and figures, each figure one value per seed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A measured quantity, one value per seed: shown as its mean, and where there are several (unless ``spread`` is
    off) with half their range, to so many ``digits`` after the point."""

    values: tuple[float, ...]
    digits: int = 3
    spread: bool = True

    @classmethod
    def of(cls, values: float | Sequence[float], digits: int = 3, spread: bool = True) -> Figure:
        """From one value or several."""
        return cls(tuple(values) if isinstance(values, Sequence) else (float(values),), digits, spread)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def half_range(self) -> float:
        return (max(self.values) - min(self.values)) / 2

    def __str__(self) -> str:
        shown = f"{self.mean:.{self.digits}f}"
        return f"{shown} ± {self.half_range:.{self.digits}f}" if self.spread and len(self.values) > 1 else shown

    def to_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "spread": self.half_range, "values": list(self.values)}


Cell = Figure | str | int | None
Rows = Sequence[Sequence[Cell]]


@dataclass
class Table:
    """One table of the paper, as measured here, beside what was published.

    Attributes:
        key: as in ``--table``.
        rows: cells under ``columns``, None where there is nothing to say.
        paper: rows of the published table under ``paper_columns``.
        notes: what a reader must know to read it.
        seconds: what all its figures took, whether measured now or found in the folder.
        data: anything more for the JSON.
    """

    key: str
    title: str
    columns: list[str]
    rows: Rows
    paper_columns: list[str] = field(default_factory=list)
    paper: Rows = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    command: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, rows as objects by column."""

        def plain(cell: Cell) -> Any:
            return cell.to_dict() if isinstance(cell, Figure) else cell

        def objects(columns: list[str], rows: Rows) -> list[dict[str, Any]]:
            return [{c: plain(x) for c, x in zip(columns, row, strict=True)} for row in rows]

        return {
            "table": self.key,
            "title": self.title,
            "command": self.command,
            "seconds": round(self.seconds, 1),
            "rows": objects(self.columns, self.rows),
            "paper": objects(self.paper_columns, self.paper),
            "notes": self.notes,
            "data": self.data,
        }

    def to_markdown(self) -> str:
        """A section with the command, the table, the paper's, and the notes."""
        lines = [f"## {self.title}", "", "```sh", self.command, "```", ""]
        lines += [*_markdown(self.columns, self.rows), ""]
        if self.paper:
            lines += ["The paper's figures:", "", *_markdown(self.paper_columns, self.paper), ""]
        lines += [*(f"- {note}" for note in self.notes), *([""] if self.notes else [])]
        return "\n".join([*lines, f"All of it took {_duration(self.seconds)}.", ""])


def _markdown(columns: list[str], rows: Rows) -> list[str]:
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return head + ["| " + " | ".join("–" if cell is None else str(cell) for cell in row) + " |" for row in rows]


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
