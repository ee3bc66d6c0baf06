"""Tensors of which nobody says where they are to be, in what numbers, or whether gradients may pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def _torchs_own() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def with_torchs_defaults(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates what users call: orders of windows, draws and figures are on the CPU and of float32, as if
    ``torch.set_default_device`` and ``torch.set_default_dtype`` had not been called. What meets the model's tensors is
    made like them in any case. Nor does ``torch.inference_mode`` hold: what is made would never train again."""

    @wraps(function)
    def called(*args: P.args, **given: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return called(*args, **given)
        if (torch.get_default_device().type, torch.get_default_dtype()) == ("cpu", torch.float32):
            return function(*args, **given)  # a device in force costs every operation some microseconds
        with _torchs_own():
            return function(*args, **given)

    return called
