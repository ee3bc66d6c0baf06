"""Tensors of which nobody says where they are to be, in what numbers, or whether gradients may pass."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def with_torchs_defaults(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates what users call: orders of windows, draws and figures are on the CPU and of float32, as if
    ``torch.set_default_device`` and ``torch.set_default_dtype`` had not been called. What meets the model's tensors is
    made like them in any case. Nor does ``torch.inference_mode`` hold: what is made would never train again."""

    @wraps(function)
    def called(*args: P.args, **given: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return called(*args, **given)
        dtype = torch.get_default_dtype()
        if (torch.get_default_device().type, dtype) == ("cpu", torch.float32):
            return function(*args, **given)  # a device in force costs every operation some microseconds
        torch.set_default_dtype(torch.float32)
        try:
            with torch.device("cpu"):
                return function(*args, **given)
        finally:
            torch.set_default_dtype(dtype)

    return called
