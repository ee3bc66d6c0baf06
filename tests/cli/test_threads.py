"""What the command line settles for its own process, before torch is there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

OWN = ("OMP_", "GOMP_", "KMP_", "MALLOC_", "GLIBC_")
# Page faults of taking the same memory a second time, for a first time that took some.
TAKEN_TWICE = """
import resource
from dofla.cli.threads import configure_threads
configure_threads()
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
    ("given", "spins"), [({}, "0"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "30000000000"), ({"GOMP_SPINCOUNT": "7"}, "7")]
)
def test_threads_of_a_verb_sleep_while_they_wait(given, spins, tmp_path):
    command = [sys.executable, *f"-m dofla profile {tmp_path} --data sample --out {tmp_path}/none".split()]
    shown = carried_out(*command, OMP_DISPLAY_ENV="verbose", **given).stderr
    assert f"GOMP_SPINCOUNT = '{spins}'" in shown


@linux
def test_freed_memory_stays_unless_the_user_says_otherwise():
    first, again = map(int, carried_out(sys.executable, "-c", TAKEN_TWICE).stdout.split())
    assert again < first / 4
    first, again = map(int, carried_out(sys.executable, "-c", TAKEN_TWICE, MALLOC_ARENA_MAX="8").stdout.split())
    assert again > first / 2
