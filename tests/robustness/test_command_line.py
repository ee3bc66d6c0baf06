"""Commands with words missing, wrong, swapped and added: they work, or end with one line and exit code 2."""

import shutil
from pathlib import Path

import pytest
import typer
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from trials import REFUSED, Trials

from dofla.cli import app

TEXT = "--data text.txt --length 16"
COMMANDS = {
    "profile": f"model {TEXT} --windows 4 --set samples=16 --out NEW",
    "curves": f"model {TEXT} --windows 6 --set steps=1 --out NEW.json",
    "allocate": "profile --budget 8 --out NEW.json",
    "distill": f"model --plan plan.json {TEXT} --windows 4 --set steps=1 --out NEW",
    "calibrate": "model --data text.txt --set length=16 --set windows=4 --out NEW.safetensors",
    "compress": "model --calibration calibration.safetensors --size 8KiB --out NEW",
    "evaluate": f"adapter {TEXT} --windows 2 --out NEW.json",
    "generate": "adapter --prompt w1 --new-tokens 2",
    "run": "recipe.yaml --out NEW",
    "report": "adapter --out NEW.html",
    "reproduce": "--model model --table 1 --seeds 1 --set data.source=text.txt --out NEW",
    "demo": "--out NEW",
}
STOPS = {"reproduce": ["--set", "data.windows=x"], "demo": ["--set", "budget=x"]}  # without, these take minutes
JUNK = ["", "x", "-1", "0", "1", "nan", "inf", "1e400", "9" * 30, str(2**63), "\udcff", "a\nb", "/", ".", "none", "a=b"]
LASTING = ("windows", "steps", "epochs", "new_tokens", "count", "seeds", "items", "samples", "budget", "lengths")
COMMON = ["-v", "-q", "--json", "--help", "--no-such-option"]


def options_of(verb: str) -> list[tuple[str, str | None]]:
    """The options of a verb: how one is written, and the name of the parameter it gives a value to, if it takes one."""
    command = typer.main.get_command(app).commands[verb]
    named = [p for p in command.params if p.opts[0].startswith("--") and p.name != "debug"]
    return [(p.opts[0], None if p.is_flag else p.name) for p in named]


def good(verb: str, made: Path, new: Path) -> list[str]:
    """The words of a command that works."""
    places = {path.name for path in made.iterdir()}
    words = [str(new) + word[3:] if word.startswith("NEW") else word for word in COMMANDS[verb].split()]
    return [str(made / word) if word in places else word for word in words]


@st.composite
def command_lines(draw: st.DrawFn, made: Path, new: Path) -> list[str]:
    verb = draw(st.sampled_from(sorted(COMMANDS)))
    places = sorted(path.name for path in made.iterdir())
    words = good(verb, made, new)
    anything = st.one_of(st.sampled_from(JUNK), st.sampled_from(places).map(lambda name: str(made / name)))
    for _ in range(draw(st.integers(0, 3))):
        how = draw(st.sampled_from(["replace", "drop", "add", "add", "option"]))
        place = draw(st.integers(0, len(words) - 1)) if words else 0
        if how == "option":
            words.append(draw(st.sampled_from(COMMON)))
        elif how == "drop":
            words[place : place + 1] = []
        elif how == "replace" and words:
            words[place] = draw(anything)
        elif how == "add":
            option, name = draw(st.sampled_from(options_of(verb)))
            value = draw(anything)
            # What would go on for ever is no fault.
            small = name in LASTING and value.isdecimal()
            words += [option] if name is None else [option, "2" if small else value]
    before = draw(st.lists(st.sampled_from(COMMON), max_size=1))
    return [*before, verb, *words, *STOPS.get(verb, [])]


def tried(trials: Trials, words: list[str], folder: Path, capsys) -> None:
    """A command that writes nowhere but to the folder, which is empty again afterwards."""
    trials.command(words, capsys)
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def fuzz(made: Path, folder: Path, capsys, inputs: int, **options) -> Trials:
    """So many command lines."""
    trials = Trials("command lines")
    options |= {"phases": [Phase.generate], "database": None, "deadline": None}

    @settings(max_examples=inputs, suppress_health_check=list(HealthCheck), **options)
    @given(command_lines(made, folder / "new"))
    def test(words):
        trials.only_once(*(word.replace(str(folder), "") for word in words))
        tried(trials, words, folder, capsys)

    test()
    trials.check()
    return trials


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    """An empty folder to write to; defaults like plan.json fall into it as well."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_wrong_command_is_refused_in_one_line_or_harmless(made, here, capsys):
    trials = fuzz(made, here, capsys, 20, derandomize=True)
    assert trials.endings[REFUSED]


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_hundreds_of_commands(made, here, capsys, part):
    fuzz(made, here, capsys, 300)


@pytest.mark.long
@pytest.mark.parametrize("verb", COMMANDS)
def test_every_option_of_every_verb(made, here, capsys, verb):
    trials = Trials("command lines")
    command = typer.main.get_command(app).commands[verb]
    fields = getattr(getattr(command.callback, "fields", None), "fields", {})
    for option, name in [*options_of(verb), *(("--set", name) for name in fields)]:
        for value in ("", "-1", "0", "nan", "9" * 30, str(2**62), "\udcff"):
            if name is None or (name in LASTING and value.isdecimal() and value != "0"):
                continue
            value = f"{name}={value}" if option == "--set" and name != "set" else value
            words = [verb, *good(verb, made, here / "new"), option, value, *STOPS.get(verb, [])]
            tried(trials, words, here, capsys)
    trials.check()
