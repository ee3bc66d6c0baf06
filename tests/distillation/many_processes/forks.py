"""Processes as ``torchrun`` starts them, but forked, which costs no imports."""

import multiprocessing
import os
import traceback
from collections.abc import Callable

from torch.distributed import TCPStore

PATIENCE = 300
"""Seconds after which processes count as hanging."""


def in_processes(count: int, work: Callable[..., None], *args) -> list[int]:
    """Call ``work(*args)`` in so many processes at once; their exit codes."""
    # Here, not in the first of them: between finding a free port and using it somebody else may take it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=_run, args=(place, count, store.port, work, args)) for place in range(count)]
    for process in started:
        process.start()
    for process in started:
        process.join(PATIENCE)
    hanging = [process for process in started if process.is_alive()]
    for process in hanging:
        process.kill()
    assert not hanging, f"{len(hanging)} of {count} processes did not end"
    return [process.exitcode for process in started]


def _run(place: int, count: int, port: int, work: Callable[..., None], args: tuple) -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()  # what the parent found out about itself
    os.environ |= {"RANK": str(place), "LOCAL_RANK": str(place), "WORLD_SIZE": str(count)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as torchrun has it: the store stands already
    os.environ["OMP_NUM_THREADS"] = "1"  # read by accelerate; OpenMP's threads do not survive a fork
    try:
        work(*args)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
