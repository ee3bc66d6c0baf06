"""Results as text, as HTML, and on a terminal."""

import re
from dataclasses import dataclass
from html.parser import HTMLParser
from io import StringIO

import pytest
import torch
from rich.console import Console
from rich.text import Text

import dofla
from dofla.display import Result, size, table
from dofla.distillation import History
from dofla.plans.curves import LayerCurve, Point
from dofla.plans.hybrid import TOKEN_SHARE
from dofla.plans.layers import CompressedLayer, FeatureLayer, SoftmaxLayer


@dataclass
class Fruit(Result):
    """A result with a name that must be escaped, a long one, and colors."""

    count: int

    def parts(self):
        yield "what there <was>"
        shown = table("fruit", "count", "", widest=20)
        shown.add_row("<apple> & [b]pear[/b]", str(self.count), Text("━━", style="cyan"))
        shown.add_row("a long name of a fruit that nobody knows", "7", "")
        yield shown


class Reader(HTMLParser):
    """The cells of all rows, and whether every tag is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.rows = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_a_result_is_text_without_colors_and_a_page_without_holes():
    lines = str(Fruit(12)).splitlines()
    assert lines[0] == "what there <was>"
    assert lines[1].split() == ["fruit", "count"]
    assert lines[2].startswith("<apple> & [b]pear[/…") or "<apple> & [b]" in lines[2]
    assert lines[2].split()[-2:] == ["12", "━━"]
    assert "…" in lines[3]
    assert lines == [line.rstrip() for line in lines]
    page = Reader(Fruit(12)._repr_html_())
    assert not page.open
    assert page.rows[1:] == [
        ["<apple> & [b]pear[/b]", "12", "━━"],
        ["a long name of a fruit that nobody knows", "7", ""],
    ]


def test_a_terminal_gets_colors():
    console = Console(file=StringIO(), force_terminal=True, width=80)
    console.print(Fruit(12))
    assert "\x1b[36m━━" in console.file.getvalue()


def results():
    layers = [f"model.layers.{n}.a_rather_long_name.self_attn" for n in range(2)]
    plan = dofla.linear.Plan(
        [FeatureLayer(layers[0], 2, 64, 64, [3, 5000], [20, 40000], 2), SoftmaxLayer(layers[1], 2, 64, 64)]
    )
    compressed = dofla.linear.Plan(
        [
            CompressedLayer(layers[0], 2, 64, 64, 16, 2, 38, 211),
            CompressedLayer(layers[1], 2, 64, 64, [16, 400], 2, [40, 20], [200, 12_000], bits=2.5),
            SoftmaxLayer("3", 2, 64, 64),
        ]
    )
    points = [Point(TOKEN_SHARE, 100_000 * n, [123.456, 0.1]) for n in range(1, 6)]
    curves = dofla.linear.Curves([LayerCurve(name, [1.5, 2.5], points) for name in layers])
    history = History(layers, torch.tensor([[2.0, 1.0]] * 10 + [[0.5, 0.25]] * 10), 3.2, {"loss": "output"})
    return {"plan": plan, "curves": curves, "history": history, "compressed": compressed}


@pytest.mark.parametrize("name", results())
def test_every_result_fits_80_columns_and_is_shown_in_notebooks(name):
    result = results()[name]
    assert max(map(len, str(result).splitlines())) <= 80
    assert len(str(result).splitlines()) < 12
    page = Reader(result._repr_html_())
    assert not page.open
    assert len({len(row) for row in page.rows}) == 1


def test_what_the_tables_of_results_hold():
    plan, curves, history, compressed = (str(result) for result in results().values())
    assert re.search(r"3-5000 +20-40000 +2 +━{24}$", plan, re.M)
    assert re.search(r"softmax attention stays in 1 layers: ", plan)
    assert re.search(r" 16 +2 +249$", compressed, re.M)
    assert re.search(r" 16-400 +2 +240-12020$", compressed, re.M)
    assert re.search(r"500000 +effect$", curves, re.M)
    assert re.search(r"61\.778 +4\.000$", curves, re.M)
    assert re.search(r"2\.0000 +0\.5000$", history, re.M)
    assert history.splitlines()[-1] == "means of the first and the last 2 of 20 steps"


@pytest.mark.parametrize(("count", "shown"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**30, "3.00 GiB")])
def test_bytes_for_people(count, shown):
    assert size(count) == shown
