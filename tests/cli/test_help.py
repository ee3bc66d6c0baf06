"""Help: verbs in groups; of each verb a few options, and the fields that ``--set`` takes."""

import re

import pytest
import typer
from typer.core import TyperArgument
from typer.testing import CliRunner

from dofla.cli import GROUPS, app
from dofla.cli.verb import OPTIONS

VERBS = typer.main.get_command(app).commands


def shown(*words: str) -> list[str]:
    return CliRunner().invoke(app, words, env={"COLUMNS": "80"}).stdout.splitlines()


def options(lines: list[str]) -> set[str]:
    """Long names that stand at the beginning of a row."""
    rows = (re.match(r"│ (?:[*] {2}| {3})?(--[\w-]+)", line) for line in lines)
    return {row[1] for row in rows if row}


def test_every_verb_is_in_a_group_and_each_group_is_a_panel():
    lines = shown("--help")
    for group, verbs in GROUPS.items():
        title = next(n for n, line in enumerate(lines) if f"─ {group} ─" in line)
        rows = lines[title + 1 : title + 1 + len(verbs)]
        # Each says in one line what it does.
        assert [row.split()[1] for row in rows] == [verb.__name__ for verb in verbs]


@pytest.mark.parametrize("verb", VERBS)
def test_help_names_at_most_eight_options_and_those_of_the_output_in_their_panel(verb):
    lines = shown(verb, "--help")
    named = {param.opts[0] for param in VERBS[verb].params if not (isinstance(param, TyperArgument) or param.hidden)}
    output = {f"--{name}" for name in OPTIONS}
    assert options(lines) == named | {"--help"}
    assert len(named - output) <= 8
    panel = next(n for n, line in enumerate(lines) if "─ Output ─" in line)
    assert options(lines[panel:]) == output


@pytest.mark.parametrize("verb", VERBS)
def test_help_ends_with_the_fields_that_are_set(verb):
    text = " ".join(" ".join(shown(verb, "--help")).split())
    assert ("Fields of --set: " in text) == ("set" in {param.name for param in VERBS[verb].params})
    if verb in ("run", "demo", "reproduce"):
        assert all(f" {name}," in text for name in ("model", "data.source", "end_to_end.lora_rank", "lambda"))
    if verb == "reproduce":
        assert " tasks.items," in text
    if verb == "demo":
        assert "Fields of --set: compression. or distillation. before model" in text


def test_help_names_the_folder_that_is_written_and_the_exit_code(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("dofla.paper.run.reproduce", lambda *_, notes, **__: seen.append(notes) or [])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "reproduce-demo-small" / "tables").mkdir(parents=True)
    said = CliRunner().invoke(app, ["reproduce", "--scale", "small"]).stdout
    assert "runs/reproduce-demo-small/tables" in said
    assert seen == [["scale small: too small to rank methods"]]
    assert "runs/reproduce-MODEL-SCALE" in " ".join(shown("reproduce", "--help"))
    assert "Exits with 1 if it is not supported." in " ".join(shown("check", "--help"))


@pytest.mark.parametrize("words", [[], *([name] for name in VERBS)], ids=" ".join)
def test_help_fits_a_terminal_and_leaves_room_to_say_something(words):
    lines = shown(*words, "--help")
    assert max(map(len, lines)) == 80
    assert max(line.index("Show this message and") for line in lines if "--help " in line) <= 50
