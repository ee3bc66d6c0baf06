"""Help: verbs in groups; of each verb a few options, and all of them with --help-all."""

from __future__ import annotations

import re

import pytest
import typer
from dofla.cli.menu import GROUPS
from typer.core import TyperArgument
from typer.testing import CliRunner

from dofla.cli import app

VERBS = typer.main.get_command(app).commands
SHORT = {name: options.split() for group in GROUPS.values() for name, options in group.items()}


def shown(*words: str) -> list[str]:
    return CliRunner().invoke(app, words, env={"COLUMNS": "80"}).stdout.splitlines()


def options(lines: list[str]) -> list[str]:
    """Long names that stand at the beginning of a row."""
    rows = (re.match(r"│ (?:[*] {2}| {3})?(--[\w-]+)", line) for line in lines)
    return [row[1] for row in rows if row]


def test_every_verb_is_in_a_group_and_each_group_is_a_panel():
    assert SHORT.keys() == VERBS.keys()
    lines = shown("--help")
    titles = [next(n for n, line in enumerate(lines) if f"─ {group} ─" in line) for group in GROUPS]
    assert titles == sorted(titles)
    for group, title in zip(GROUPS.values(), titles, strict=True):
        rows = lines[title + 1 : title + 1 + len(group)]
        assert [row.split()[1] for row in rows] == list(group)  # each says in one line what it does


@pytest.mark.parametrize("verb", VERBS)
def test_short_help_names_at_most_eight_options_and_says_where_the_others_are(verb):
    lines, known = shown(verb, "--help"), VERBS[verb].params
    names = options(lines)
    assert len(names) == len(SHORT[verb]) + 1 <= 8
    of_verb = {param.name: param for param in known if not isinstance(param, TyperArgument)}
    assert {of_verb[name].opts[0] for name in SHORT[verb]} | {"--help"} == set(names)
    last = [line for line in lines if line.strip()][-1]
    assert last.split() == [str(len(of_verb) - len(SHORT[verb])), *f"more options: root {verb} --help-all".split()]
    assert all(param.required is False or param.name in SHORT[verb] for param in of_verb.values())


@pytest.mark.parametrize("verb", VERBS)
def test_help_all_names_every_option_in_panels(verb):
    lines = shown(verb, "--help-all")
    names = {param.opts[0] for param in VERBS[verb].params if not isinstance(param, TyperArgument)}
    assert set(options(lines)) == names | {"--help"}
    assert any("─ Output ─" in line for line in lines)


@pytest.mark.parametrize("words", [[], *([name] for name in VERBS)], ids=" ".join)
@pytest.mark.parametrize("how", ["--help", "--help-all"])
def test_help_fits_a_terminal_and_leaves_room_to_say_something(words, how):
    lines = shown(*words, how if words else "--help")
    assert max(map(len, lines)) == 80
    assert max(line.index("Show this message and") for line in lines if "--help " in line) <= 50
