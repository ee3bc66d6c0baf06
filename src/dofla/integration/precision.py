"""The question of a processor: does it multiply numbers of half precision, or take them apart one by one?"""

from __future__ import annotations

import logging
import time
from functools import lru_cache

import torch
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

HALF = (torch.bfloat16, torch.float16)
TOO_SLOW = 5.0
"""Times as long as in float32: about once where there are instructions for them, without them some fifty times."""


def half_is_slow() -> bool:
    """True if models are better opened in float32 here, however they are saved: no GPU, and a processor that is many
    times quicker in it."""
    return not torch.cuda.is_available() and times_as_long(torch.bfloat16) > TOO_SLOW


def warn_of_slow_products(model: PreTrainedModel) -> None:
    """Say so, once, if a model of half precision stands on a processor that is many times quicker in float32."""
    if model.device.type == "cpu" and model.dtype in HALF and times_as_long(model.dtype) > TOO_SLOW:
        _warn(model.dtype)


@lru_cache
def _warn(dtype: torch.dtype) -> None:
    logger.warning(
        "this processor takes products in %s %.0f times as long as in float32: open the model with dtype=torch.float32 "
        "(--dtype float32), which takes twice the memory for weights",
        str(dtype).removeprefix("torch."),
        times_as_long(dtype),
    )


@lru_cache
@torch.no_grad()
def times_as_long(dtype: torch.dtype) -> float:
    """The time of a matrix product in ``dtype``, relative to float32. It is the least of many small ones, which take
    turns, as a busy machine may keep one waiting a hundred times as long as it takes."""
    rows, weight = torch.ones(64, 256), torch.ones(256, 256)
    taken: dict[torch.dtype, list[float]] = {torch.float32: [], dtype: []}
    for _ in range(16):
        for kind, seconds in taken.items():
            a, b = rows.to(kind), weight.to(kind)
            started = time.perf_counter()
            torch.mm(a, b)
            seconds.append(time.perf_counter() - started)
    return min(taken[dtype]) / min(taken[torch.float32])
