"""Tables as data, as Markdown, and on a terminal of 80 columns."""

import io
import json

import pytest
from rich.console import Console

from dofla.paper import Figure, Table
from dofla.paper.table import show
from dofla.runs.view import View


def table(columns=4, rows=3, name="a name"):
    names = ["model", *(f"a heading of several words {n}" for n in range(1, columns))]
    body = [[f"{name} {r}", *(Figure.of([0.1 * r, 0.2 * n]) for n in range(1, columns))] for r in range(rows)]
    return Table("A title", names, body, ["theirs", "loss"], [["x", "1.0"]], ["a note"], 3.0, "dofla reproduce")


def test_a_figure_is_its_mean_and_half_its_range():
    figure = Figure.of([1.0, 2.0, 6.0], 2)
    assert str(figure) == "3.00 ± 2.50"
    assert figure.to_dict() == {"mean": 3.0, "spread": 2.5, "values": [1.0, 2.0, 6.0]}
    assert str(Figure.of(1.25, 1)) == "1.2"
    assert str(Figure.of([1.0, 3.0], 1, spread=False)) == "2.0"


def test_markdown_has_the_command_the_table_the_papers_and_the_time():
    text = table().to_markdown()
    assert text.startswith("## A title\n\n```sh\ndofla reproduce\n```\n\n| model | a heading")
    assert "| a name 1 | 0.150 ± 0.050 |" in text
    assert "The paper's figures:\n\n| theirs | loss |\n|---|---|\n| x | 1.0 |" in text
    assert "- a note" in text
    assert text.rstrip().endswith("All of it took 3 s.")


def test_json_has_rows_by_column():
    data = json.loads(json.dumps(table().to_dict()))
    assert data["rows"][1]["model"] == "a name 1"
    assert data["rows"][1]["a heading of several words 1"]["values"] == [0.1, 0.2]
    assert data["paper"] == [{"theirs": "x", "loss": "1.0"}]
    assert (data["seconds"], data["command"]) == (3.0, "dofla reproduce")


@pytest.mark.parametrize("columns", [2, 6, 13, 20])
@pytest.mark.parametrize("name", ["a", "a very long name of a module, longer than there is room"])
def test_a_terminal_of_80_columns_shows_every_figure_whole(columns, name):
    view = View(quiet=True)
    out = io.StringIO()
    view.console = Console(file=out, width=80, highlight=False)
    given = table(columns, name=name)
    show(view, given)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert out.getvalue().count("±") == 3 * (columns - 1)
    for n in range(1, columns):
        assert str(given.rows[2][n]).replace(" ± ", "±") in out.getvalue()
