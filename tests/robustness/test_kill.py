"""The short form of scripts/kill_test.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "kill_test.py"


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_run_that_is_killed_goes_on_and_ends_with_the_same_weights(tmp_path, kills):
    command = [sys.executable, SCRIPT, "--kills", str(kills), "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().splitlines()[-1].startswith(f"{kills} of {kills}")
