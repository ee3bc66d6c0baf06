"""The table of degrees of freedom, and whom it says not to trust."""

import math

import pytest

from dofla.display import as_text
from dofla.profiles.table import degrees_tables, doubtful


@pytest.mark.parametrize("heads", [1, 6, 7, 8, 12, 13, 32])
@pytest.mark.parametrize("error", [0.04, 12.3, 456.0, math.nan])
def test_a_table_fits_80_columns_and_shows_every_head_once(heads, error):
    dof = [[100.0 * layer + head + 0.5 for head in range(heads)] for layer in range(3)]
    shown = as_text(degrees_tables("of a test", dof, [[error] * heads] * 3))
    assert max(map(len, shown.splitlines())) <= 80
    for value in (n for row in dof for n in row):
        written = f"{value:.1f}" if value < 100 else f"{value:.0f}"
        assert sum(line.split()[1:].count(written) for line in shown.splitlines()) >= 1
    assert shown.count("±") == (0 if math.isnan(error) else 3 * heads)


def test_a_layer_with_fewer_heads_leaves_its_cells_empty():
    lines = as_text(degrees_tables("of a test", [[1.0], [2.0, 3.0]], [[0.1], [0.2, 0.3]])).strip().splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["layer", "0", "1"],
        ["0", "1.0", "±", "0.1"],
        ["1", "2.0", "±", "0.2", "3.0", "±", "0.3"],
    ]


def test_heads_are_named_whose_error_is_above_a_quarter_of_the_value():
    dof, errors = [[4.0, 4.0], [8.0, 8.0], [1.0, 1.0]], [[1.0, 1.01], [0.1, 0.1], [math.nan, 0.3]]
    first, names = doubtful(dof, errors)
    assert "2 of 6 heads" in first
    assert names.split("; ") == ["  layer 0 head 1", "layer 2 head 1"]
    assert doubtful(dof, [[0.1, 0.1]] * 3) == []


def test_many_doubtful_heads_take_two_lines_of_80_columns():
    lines = doubtful([[1.0] * 12] * 40, [[0.5] * 12] * 40)
    assert len(lines) == 2
    assert "480 of 480" in lines[0]
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("  layer 0 heads 0, 1, 2, 3, …; layer 1 heads 0, ")
    assert lines[1].endswith(" …")
