"""Calls that take turns, so that all of them meet what else a machine does. Nothing of dofla."""

from __future__ import annotations

import time
from collections.abc import Callable


def least(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds of each at the least, after one untimed."""
    taken: dict[str, list[float]] = {kind: [] for kind in calls}
    for _ in range(1 + repeats):
        for kind, call in calls.items():
            started = time.perf_counter()
            call()
            taken[kind].append(time.perf_counter() - started)
    return {kind: min(times[1:]) for kind, times in taken.items()}
