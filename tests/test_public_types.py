"""The public API as a type checker sees it: no decorator takes parameters away."""

import inspect
import re
from operator import attrgetter
from pathlib import Path

import pytest

import dofla

SPACES = ("linear", "serving")
NAMES = [name for name in dofla.__all__ if name not in ("DoflaError", *SPACES)]
NAMES += [f"{space}.{name}" for space in SPACES for name in getattr(dofla, space).__all__]
RESULTS = """
model, tokenizer, text = dofla.demo()
windows = dofla.token_windows("sample", tokenizer, windows=12)
assert_type(windows, dofla.TokenWindows)
assert_type(dofla.compress(model, windows, size="128KiB"), PreTrainedModel)
assert_type(dofla.linear.linearize(dofla.load("out", dtype="float32"), budget=64), PreTrainedModel)
assert_type(dofla.linear.distill(model, windows, progress=lambda step, steps, losses: None).seconds, float)
assert_type(dofla.evaluate(model, windows, progress=False).loss_increase, float | None)
assert_type(dofla.linear.allocate(dofla.linear.profile(model, windows), 64), dofla.linear.Plan)
assert_type(dofla.check("owner/name").cache[0].factor, float)
"""


@pytest.fixture
def said(tmp_path, monkeypatch, pytestconfig) -> dict[int, str]:
    """mypy's words, by line, on a program that reveals each name, gives it a wrong argument, and uses some results."""
    api = pytest.importorskip("mypy.api")
    imports = "import dofla; from transformers import PreTrainedModel; from typing_extensions import assert_type"
    revealed = [f"reveal_type(dofla.{name})" for name in NAMES]
    misused = [f"dofla.{name}(wrong=1)" for name in NAMES]
    (tmp_path / "program.py").write_text("\n".join([imports, *revealed, *misused, RESULTS]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MYPYPATH", str(Path(__file__).parents[1] / "src"))
    cache = pytestconfig.cache.mkdir("mypy")  # half a minute without it, a second with it
    out, err, _ = api.run(["--config-file=", "--ignore-missing-imports", f"--cache-dir={cache}", "program.py"])
    assert not err
    words: dict[int, str] = {}
    for line in out.splitlines()[:-1]:
        file, number, message = line.split(":", 2)
        assert file == "program.py", line
        words[int(number)] = words.get(int(number), "") + message
    return words


@pytest.mark.slow
def test_every_parameter_is_known_and_a_wrong_one_is_an_error(said):
    for number, name in enumerate(NAMES, start=2):
        revealed, misused = said.pop(number), said.pop(number + len(NAMES), "")
        known = inspect.signature(attrgetter(name)(dofla)).parameters.values()
        assert not re.search(r"\*(\w+: )?Any, \*\*", revealed), f"{name}: {revealed}"
        assert [x.name for x in known if f"{x.name}: " not in revealed] == [], f"{name}: {revealed}"
        takes_all = any(x.kind is x.VAR_KEYWORD for x in known)
        assert takes_all or 'Unexpected keyword argument "wrong"' in misused, f"{name}: {misused or 'no error'}"
    assert not said  # of the results
