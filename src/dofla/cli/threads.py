"""Settings for waiting threads and freed memory, which decide the speed of a verb on a machine that is not idle.

Both have to be set before torch is imported, and for the process of a verb alone: a program that imports dofla keeps
its settings.
"""

import ctypes
import os
import sys

WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}
"""A thread that has done its part sleeps until the others have. Spinning, OpenMP's habit, takes the core from whoever
should finish."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h
_OWN = ("MALLOC_", "GLIBC_TUNABLES")


def configure_threads() -> None:
    """Settle both, but for what the user's own environment says (``OMP_WAIT_POLICY``, ``MALLOC_*``)."""
    for name, value in WAITING.items():
        os.environ.setdefault(name, value)
    if not any(name.startswith(_OWN) for name in os.environ):
        keep_memory()


def keep_memory() -> bool:
    """Let freed memory stay with the process, where the C library is glibc: whether it is.

    A tensor above 32 MiB otherwise comes fresh from the system each time, with pages that have to be cleared first.
    What is kept is about what was needed at once.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
