"""Tensors of which nobody says where they are to be."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def made_on_the_cpu(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates what users call: orders of windows, draws and figures are made on the CPU, as if
    ``torch.set_default_device`` had said nothing. What meets the model's tensors is sent to them in any case."""

    @wraps(function)
    def called(*args: P.args, **given: P.kwargs) -> R:
        elsewhere = torch.get_default_device().type != "cpu"
        with torch.device("cpu") if elsewhere else nullcontext():
            return function(*args, **given)

    return called
