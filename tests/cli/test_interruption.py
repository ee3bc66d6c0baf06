"""Ctrl-C: one line that says what is kept, and exit code 130."""

from pathlib import Path

import pytest
from command_line import call


def interrupt(*given, **_):
    """Is interrupted; if it is given a folder, once it has finished something."""
    for folder in (x for x in given if isinstance(x, Path) and not x.exists()):
        folder.mkdir(parents=True)
        (folder / "finished").touch()
    raise KeyboardInterrupt


SHORT = ["--size", "102KiB", "--set", "windows=2", "--set", "length=32", "--set", "head_budgets=even"]


@pytest.mark.parametrize(
    ("words", "where", "said"),
    [
        (["compress", "demo", *SHORT, "--out", "new"], "dofla.runs.opening.open_original", "(nothing was written)"),
        (["compress", "demo", *SHORT, "--out", "new"], "dofla.cli.compression.written", "(new was written already)"),
        (["evaluate", "demo", "--data", "sample"], "dofla.runs.opening.open_converted", "(nothing was written)"),
        (["generate", "demo", "--prompt", "Once"], "dofla.runs.opening.open_converted", ""),
        (
            ["run", "compress", "--set", "model=demo", "--out", "new"],
            "dofla.runs.run.run",
            "(new has what was finished",
        ),
        (["demo", "--out", "new"], "dofla.runs.run.run", "(new has what was finished: the same command"),
        (["reproduce"], "dofla.paper.run.reproduce", "(runs/reproduce-demo-full has what was finished: the same"),
        (["reproduce"], "dofla.paper.study.Study.of", "(nothing was written)"),
    ],
)
def test_what_is_kept_is_said(words, where, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(where, interrupt)
    assert call(*words) == 130
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith(f"dofla: interrupted {said}".rstrip())
    assert "Traceback" not in error
    assert (tmp_path / "new").exists() == ("new" in said)
