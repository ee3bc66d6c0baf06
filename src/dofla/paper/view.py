"""A table on a terminal of 80 columns."""

from rich.console import Group
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from dofla.paper.table import Cell, Figure, Table
from dofla.runs.view import View

_WIDTH, _NAME = 78, 26


def show(view: View, table: Table) -> None:
    """Title, figures, notes. Columns that find no room stand in a second block below."""
    cells = [[_short(cell) for cell in row] for row in table.rows]
    parts: list = [Text(f"\n{table.title}", style="bold")]
    widths = _widths(table.columns, cells)
    for columns in _blocks(widths):
        grid = RichTable(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        grid.add_column(table.columns[0], no_wrap=True, max_width=_NAME, overflow="ellipsis")
        for n in columns:
            grid.add_column(table.columns[n], justify="right", width=widths[n])
        for row in cells:
            grid.add_row(row[0], *(row[n] for n in columns))
        parts.append(grid)
    parts += [Padding(Text(note, style="grey50"), (0, 0, 0, 2)) for note in table.notes]
    view.console.print(Group(*parts))


def _short(cell: Cell) -> str:
    if cell is None:
        return "–"
    return str(cell).replace(" ± ", "±") if isinstance(cell, Figure) else str(cell)


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
