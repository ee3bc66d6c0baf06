"""The command line, carried out in the process of the tests."""

import sys
from typing import Any

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
