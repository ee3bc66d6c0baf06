"""The short form of scripts/kill_test.py."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "kill_test.py"


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_and_ends_with_the_same_weights(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "--kills", "3", "--out", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().splitlines()[-1].startswith("3 of 3")
