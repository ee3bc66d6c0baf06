"""The rank of this process among those that ``torchrun`` or ``accelerate launch`` started, without joining them."""

import os
import sys
from typing import Any


def rank() -> int:
    """Number of this process, from 0."""
    return group.get_rank() if (group := _process_group()) else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of processes that were started together."""
    return group.get_world_size() if (group := _process_group()) else int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """True if this process is to write files and show progress."""
    return rank() == 0


def _process_group() -> Any:
    """``torch.distributed``, if the processes have joined."""
    distributed = sys.modules.get("torch.distributed")
    return distributed if distributed and distributed.is_available() and distributed.is_initialized() else None
