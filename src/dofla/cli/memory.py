"""A setting for freed memory, which decides the speed of a verb where tensors are large. It holds for the process of a
verb alone: a program that imports dofla keeps its own.
"""

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h
_OWN = ("MALLOC_", "GLIBC_TUNABLES")


def keep_memory() -> bool:
    """Let freed memory stay with the process, where the C library is glibc and the user's environment says nothing else
    (``MALLOC_*``): whether it does.

    A tensor above 32 MiB otherwise comes fresh from the system each time, with pages that have to be cleared first.
    What is kept is about what was needed at once.
    """
    if not sys.platform.startswith("linux") or any(name.startswith(_OWN) for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
