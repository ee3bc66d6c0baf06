"""Table: rows of text and figures, each figure one value per seed; as data, as Markdown, and on a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from dofla.runs.view import View

_WIDTH, _NAME = 78, 26  # columns of a terminal, and of its first column at most


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
    """One table of the paper, as measured here, beside what was published."""

    title: str
    columns: list[str]
    rows: Rows  # cells under the columns, None where there is nothing to say
    paper_columns: list[str] = field(default_factory=list)
    paper: Rows = field(default_factory=list)  # of the published table
    notes: list[str] = field(default_factory=list)  # what a reader must know to read it
    seconds: float = 0.0  # what all its figures took, whether measured now or found in the folder
    command: str = ""
    data: dict[str, Any] = field(default_factory=dict)  # anything more for the JSON
    key: str = ""  # as in --table

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


def show(view: View, table: Table) -> None:
    """Title, figures, notes. Columns that find no room stand in a second block below."""
    cells = [["–" if cell is None else str(cell).replace(" ± ", "±") for cell in row] for row in table.rows]
    view.show(Text(f"\n{table.title}", style="bold"))
    widths = _widths(table.columns, cells)
    for columns in _blocks(widths):
        grid = Grid(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        grid.add_column(table.columns[0], no_wrap=True, max_width=_NAME, overflow="ellipsis")
        for n in columns:
            grid.add_column(table.columns[n], justify="right", width=widths[n])
        for row in cells:
            grid.add_row(row[0], *(row[n] for n in columns))
        view.show(grid)
    for note in table.notes:
        view.console.print(Padding(Text(note, style="grey50"), (0, 0, 0, 2)))


def _widths(columns: list[str], cells: list[list[str]]) -> list[int]:
    """The widths of the columns in characters: a heading may be broken between words, a figure may not."""
    longest = [max(len(row[n]) for row in cells) for n in range(len(columns))]
    rest = [max(longest[n], *map(len, columns[n].split())) for n in range(1, len(columns))]
    return [min(_NAME, longest[0]), *rest]


def _blocks(widths: list[int]) -> list[list[int]]:
    """Numbers of the columns that stand side by side, beside the first."""
    blocks: list[list[int]] = [[]]
    room = _WIDTH - widths[0]
    for n, width in enumerate(widths[1:], start=1):
        if width + 1 > room and blocks[-1]:
            blocks.append([])
            room = _WIDTH - widths[0]
        blocks[-1].append(n)
        room -= width + 1
    return blocks
