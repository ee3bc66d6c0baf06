"""What is settled before torch is there: how threads wait, and for a verb what freed memory does."""

import os
import subprocess
import sys

import pytest

OWN = ("OMP_", "GOMP_", "KMP_", "MALLOC_", "GLIBC_")
# Page faults of taking the same memory a second time, for a first time that took some.
TAKEN_TWICE = """
import resource
from dofla.cli.memory import keep_memory
keep_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults(), faults())
"""

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the libraries of Linux")


def carried_out(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process whose environment says nothing else of memory and threads."""
    rest = {name: value for name, value in os.environ.items() if not name.startswith(OWN)}
    return subprocess.run(command, capture_output=True, text=True, env=rest | environment)


@pytest.mark.slow
@linux
@pytest.mark.parametrize(
    ("program", "given", "spins"),
    [
        ("import dofla, torch", {}, "1000"),
        ("import dofla, torch", {"OMP_WAIT_POLICY": "ACTIVE"}, "30000000000"),
        ("import dofla, torch", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("import torch, dofla", {"OMP_WAIT_POLICY": "ACTIVE"}, "30000000000"),
    ],
)
def test_threads_that_wait_soon_sleep(program, given, spins):
    shown = carried_out(sys.executable, "-c", program, OMP_DISPLAY_ENV="verbose", **given).stderr
    assert f"GOMP_SPINCOUNT = '{spins}'" in shown


@linux
def test_freed_memory_stays_unless_the_user_says_otherwise():
    first, again = map(int, carried_out(sys.executable, "-c", TAKEN_TWICE).stdout.split())
    assert again < first / 4
    first, again = map(int, carried_out(sys.executable, "-c", TAKEN_TWICE, MALLOC_ARENA_MAX="8").stdout.split())
    assert again > first / 2
