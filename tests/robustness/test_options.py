"""Options that every verb has."""

import json
import logging

import pytest
import typer
from command_line import call

from dofla.cli import app
from dofla.distillation.fidelity import LayerFidelity
from dofla.evaluation import Evaluation

VERBS = sorted(typer.main.get_command(app).commands)


@pytest.fixture
def profiling(made, tmp_path):
    """A short command, without a common option."""
    text = ["--data", made / "text.txt", "--length", 16, "--windows", 4, "--set", "samples=16"]
    return ["profile", made / "model", *text, "--out", tmp_path / "profile"]


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_them(name):
    command = typer.main.get_command(app).commands[name]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {"--verbose", "-v", "--quiet", "-q", "--json", "--debug"} <= options


def test_by_default_results_go_to_standard_output_and_progress_to_standard_error(profiling, capsys):
    assert call(*profiling) == 0
    out, err = capsys.readouterr()
    assert "Degrees of freedom" in out
    assert "profile written to" in out
    assert "next: dofla allocate" in out
    assert err.startswith("profile: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("before", [True, False], ids=["before the verb", "after it"])
def test_quiet_says_nothing(profiling, capsys, before):
    words = ["-q", *profiling] if before else [*profiling, "-q"]
    assert call(*words) == 0
    assert capsys.readouterr() == ("", "")


def test_verbose_says_what_is_done(profiling, capsys, made):
    assert call(*profiling, "-v") == 0
    out, err = capsys.readouterr()
    assert f"dofla.runs.opening: loading {made / 'model'}" in err
    assert "4 windows of 16 tokens" in err
    assert "dofla.storage.files: wrote" not in err
    assert "dofla.runs.opening" not in out


def test_debug_says_everything_and_the_log_is_as_it_was_afterwards(profiling, capsys):
    logger = logging.getLogger("dofla")
    before = logger.level, list(logger.handlers)
    assert call(*profiling, "--debug") == 0
    assert "dofla.storage.files: wrote" in capsys.readouterr().err
    assert (logger.level, logger.handlers) == before


def test_an_error_shows_where_it_comes_from_only_when_asked(capsys):
    assert call("allocate", "no/such/folder") == 2
    assert capsys.readouterr().err == "dofla: no/such/folder does not exist: it should hold a profile\n"
    assert call("allocate", "no/such/folder", "--debug") == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_fault_of_doflas_own_is_one_line_and_exit_code_1(monkeypatch, made, capsys):
    monkeypatch.setattr("dofla.runs.opening.open_converted", lambda *_, **__: 1 / 0)
    assert call("generate", made / "adapter", "--prompt", "w1") == 1
    error = capsys.readouterr().err
    assert error == "dofla: unexpected ZeroDivisionError: division by zero (a bug in dofla: --debug shows where)\n"


def results(capsys, *words) -> dict:
    """What a verb prints with ``--json``; and progress has gone elsewhere."""
    capsys.readouterr()
    assert call(*words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_the_results_of_the_verbs_as_json(made, tmp_path, capsys):
    text = ["--data", made / "text.txt", "--length", 16, "--windows", 4]
    found = results(capsys, "profile", made / "model", *text, "--set", "samples=16", "--out", tmp_path / "profile")
    assert len(found["degrees_of_freedom"]["model.layers.1.self_attn"]) == 2
    found = results(capsys, "allocate", made / "profile", "--budget", 8, "--out", tmp_path / "plan.json")
    assert found["layers"].keys() == {f"model.layers.{n}.self_attn" for n in (0, 1)}
    assert found["state_bytes"] > 0
    words = ["--plan", made / "plan.json", *text, "--set", "steps=2", "--out", tmp_path / "out"]
    found = results(capsys, "distill", made / "model", *words)
    assert found["adapter"] == str(tmp_path / "out" / "adapter")
    assert len(found["last_losses"]) == 2
    found = results(capsys, "evaluate", made / "adapter", *text)
    assert found["language"]["original_loss"] > 0
    found = results(capsys, "generate", made / "adapter", "--prompt", "w1 w2", "--new-tokens", 3)
    assert len(found["tokens"]) == 3
    found = results(capsys, "run", made / "recipe.yaml", "--out", tmp_path / "run")
    assert [student["name"] for student in found["models"]] == ["Fix", "Even"]


def test_a_generated_text_is_shown_even_when_quiet(made, capsys):
    words = ["generate", made / "adapter", "--prompt", "w1 w2", "--new-tokens", 3]
    found = results(capsys, *words)
    assert call(*words, "-q") == 0
    assert capsys.readouterr() == (found["text"] + "\n", "")


def test_numbers_that_json_does_not_have_are_null(made, monkeypatch, capsys):
    layers = {"a": LayerFidelity(kl=float("inf"), head_kl=[1.0], output_error=1.0, kernel_error=1.0)}
    figures = Evaluation({}, "text", windows=1, layers=layers, state_bytes=1, cosine=1.0, spearman=1.0)
    monkeypatch.setattr("dofla.evaluation.evaluate", lambda *_, **__: figures)
    found = results(capsys, "evaluate", made / "adapter", "--data", made / "text.txt", "--length", 16)
    assert found["layers"]["a"] == {"kl": None, "head_kl": [1.0], "output_error": 1.0, "kernel_error": 1.0}


def test_losses_of_a_run_go_to_a_tracker_which_is_no_other_recipe(made, tmp_path, capsys):
    out = tmp_path / "run"
    assert call("run", made / "recipe.yaml", "--out", out, "--set", "track=[tensorboard]") == 0
    assert [path.name for path in (out / "track").iterdir()] == ["even-seed0"]
    assert any((out / "track" / "even-seed0").glob("events.out.tfevents.*"))
    assert call("run", made / "recipe.yaml", "--out", out) == 0
    assert call("run", made / "recipe.yaml", "--out", tmp_path / "other", "--set", "track=[magic]") == 2
    assert "track is magic" in capsys.readouterr().err
