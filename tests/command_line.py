"""The command line, carried out in the process of the tests."""

import sys
from typing import Any

import pytest

from dofla.cli import main


def call(*words: Any) -> int:
    """Run the command line; returns its exit code."""
    before, sys.argv = sys.argv, ["dofla", *map(str, words)]
    try:
        main()
    except SystemExit as stop:
        return stop.code or 0
    finally:
        sys.argv = before
    return 0


def refused(capsys: pytest.CaptureFixture, *words: Any) -> str:
    """The one line with which a command line that is refused ends."""
    capsys.readouterr()
    assert call(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line
