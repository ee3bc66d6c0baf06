"""Commands with words missing, wrong, swapped and added: they work, or end with one line and exit code 2."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import typer
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from inputs import call

from dofla.cli import app

TEXT = "--data text.txt --length 16"
COMMANDS = {
    "profile": f"model {TEXT} --windows 4 --samples 16 --out NEW",
    "curves": f"model {TEXT} --windows 6 --steps 1 --out NEW.json",
    "allocate": "profile --budget 8 --out NEW.json",
    "distill": f"model --plan plan.json {TEXT} --windows 4 --steps 1 --out NEW",
    "evaluate": f"adapter {TEXT} --windows 2 --out NEW.json",
    "probe": f"adapter {TEXT} --windows 2 --count 1 --new-tokens 2 --lengths 16 --positions --out NEW.json",
    "generate": "adapter --prompt w1 --new-tokens 2",
    "finetune": "model --task quiz.jsonl --items 2 --epochs 1 --keep last --out NEW",
    "run": "recipe.yaml --out NEW",
    "report": "adapter --out NEW.html",
    "reproduce": "--model model --table 1 --seeds 1 --set data.source=text.txt --set data.windows=x --out NEW",
    "demo": "--set budget=x --out NEW",
}
JUNK = ["", "x", "-1", "0", "1", "nan", "inf", "1e400", "9" * 30, str(2**63), "\udcff", "a\nb", "/", ".", "none", "a=b"]
LASTING = ("windows", "steps", "epochs", "new_tokens", "count", "seeds", "items", "samples", "budget", "lengths")
COMMON = ["-v", "-q", "--json", "--help", "--no-such-option"]


def options_of(verb: str) -> list[tuple[str, str]]:
    """The options of a verb: how one is written, and its parameter's name."""
    command = typer.main.get_command(app).commands[verb]
    return [(p.opts[0], p.name) for p in command.params if p.opts[0].startswith("--") and p.name != "debug"]


def good(verb: str, made: Path, new: Path) -> list[str]:
    """The words of a command that would work (``reproduce`` and ``demo``, which take minutes, would not)."""
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
            words += [option] if option in COMMON else [option, "2" if small else value]
    before = draw(st.lists(st.sampled_from(COMMON), max_size=1))
    return [*before, verb, *words]


def fault(words: list[str], code: int, out: str, err: str) -> str | None:
    """What is wrong with the way in which a command ended."""
    if code not in (0, 2) or "Traceback" in err or "dofla: unexpected" in err:
        return f"exit code {code}: {err.strip().splitlines()[-1:]}"
    if code == 2 and not err.splitlines()[-1].startswith(("dofla: ", "╰")):  # the latter ends typer's box
        return f"says {err!r}"
    if words[0] == "--json" and "--help" not in words:
        try:
            assert code == 2 or json.loads(out) is not None
        except ValueError:
            return f"prints {out!r}"
    return None


def end(words: list[str], folder: Path, capsys) -> tuple[int, str | None]:
    """How a command ends that writes nowhere but to the folder: its exit code, and what is wrong with that."""
    capsys.readouterr()
    code = call(*words)
    found = fault(words, code, *capsys.readouterr())
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return code, found and f"{words}: {found}"


def fuzz(made: Path, folder: Path, capsys, inputs: int, **options) -> Counter:
    """So many command lines; returns how they ended."""
    counts, faults = Counter(), []
    options |= {"phases": [Phase.generate], "database": None, "deadline": None}

    @settings(max_examples=inputs, suppress_health_check=list(HealthCheck), **options)
    @given(command_lines(made, folder / "new"))
    def test(words):
        code, found = end(words, folder, capsys)
        counts["done" if code == 0 else "refused"] += 1
        faults.extend([found] if found else [])

    test()
    assert not faults, "\n".join(faults[:20])
    return counts


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    """An empty folder to write to; defaults like plan.json fall into it as well."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_wrong_command_is_refused_in_one_line_or_harmless(made, here, capsys):
    counts = fuzz(made, here, capsys, 40, derandomize=True)
    assert counts["refused"] > 0


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_hundreds_of_commands(made, here, capsys, part):
    counts = fuzz(made, here, capsys, 250)
    with capsys.disabled():
        print(f"\ncommands: {counts.total()} tried, {counts['refused']} refused, {counts['done']} done, 0 tracebacks")


@pytest.mark.long
@pytest.mark.parametrize("verb", COMMANDS)
def test_every_option_of_every_verb(made, here, capsys, verb):
    faults, tried = [], 0
    for option, name in options_of(verb):
        for value in ("", "-1", "0", "nan", "9" * 30, str(2**62), "\udcff"):
            if option in COMMON or (name in LASTING and value.isdecimal() and value != "0"):
                continue
            tried += 1
            _, found = end([verb, *good(verb, made, here / "new"), option, value], here, capsys)
            faults.extend([found] if found else [])
    with capsys.disabled():
        print(f"\n{verb}: {tried} tried, {len(faults)} tracebacks")
    assert not faults, "\n".join(faults[:20])
