"""Results that show themselves as tables: in 80 columns of text, in a terminal's colors, in a notebook's HTML."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import Field, asdict
from html import escape
from io import StringIO
from typing import Any, ClassVar

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

WIDTH = 80
"""Columns of a table as text."""

Part = Table | str
"""A table, or lines between tables."""


def table(first: str, *others: str, gap: int = 2, widest: int | None = None, **options: Any) -> Table:
    """An empty table without lines: a column of names, of so many characters at ``widest``, then columns of figures,
    which stand to the right, with a ``gap`` between; ``options`` are those of :class:`rich.table.Table`."""
    made = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), **options)
    made.add_column(first, max_width=widest, overflow="ellipsis", no_wrap=True)
    for title in others:
        made.add_column(title, justify="right", no_wrap=True)
    return made


class Result:
    """Base of the dataclasses that dofla's functions return: ``str()`` is a table, a notebook shows it as HTML, and
    :meth:`to_dict` is what JSON files hold."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def parts(self) -> Iterator[Part]:
        """The tables, and lines between them."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return as_text(self.parts())

    def __rich__(self) -> RenderableType:
        return Group(*map(_renderable, self.parts()))

    def _repr_html_(self) -> str:
        return as_html(self.parts())


def as_text(parts: Iterable[Part]) -> str:
    """Without colors, in :data:`WIDTH` columns."""
    out = StringIO()
    console = Console(file=out, width=WIDTH, color_system=None, markup=False, force_terminal=False, force_jupyter=False)
    for part in parts:
        console.print(_renderable(part))
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").split("\n"))


def as_html(parts: Iterable[Part]) -> str:
    """Tables and paragraphs."""
    return "\n".join(_html_table(part) if isinstance(part, Table) else _paragraph(part) for part in parts)


def _renderable(part: Part) -> RenderableType:
    return Text(part) if isinstance(part, str) else part


def _paragraph(text: str) -> str:
    return f"<p>{escape(text.strip())}</p>" if text.strip() else ""


def _html_table(table: Table) -> str:
    columns = [(column.header, list(column.cells), column.justify) for column in table.columns]
    head = "".join(f"<th{_side(side)}>{_cell(title)}</th>" for title, _, side in columns)
    rows = zip(*([f"<td{_side(side)}>{_cell(cell)}</td>" for cell in cells] for _, cells, side in columns), strict=True)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _side(justify: str) -> str:
    return f' style="text-align: {"right" if justify == "right" else "left"}"'


def _cell(content: RenderableType) -> str:
    return escape(content.plain if isinstance(content, Text) else str(content)).replace("\n", "<br>")


def figure(value: float) -> str:
    """A number in three significant digits, never in powers of ten."""
    if not math.isfinite(value):
        return str(value)
    value = float(f"{value:.2e}")
    places = 2 - math.floor(math.log10(abs(value))) if value else 2
    return f"{value:,.{min(max(places, 0), 8)}f}"


def percent(fraction: float) -> str:
    """An increase in percent, with its sign: ``+0.332 %``."""
    return f"{'-' if fraction < 0 else '+'}{figure(100 * abs(fraction))} %"


def factor(before: float, after: float) -> str:
    """The size of a cache beside that of another: ``15.1 x smaller``."""
    ratio, word = (before / after, "smaller") if before >= after else (after / before, "larger")
    return f"{figure(ratio)} x {word}"


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
