"""Models that something has been put around."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from torch import nn
from transformers import PreTrainedModel

from dofla.errors import DoflaError

P = ParamSpec("P")
R = TypeVar("R")

_INSIDE = ("_orig_mod", "module")
"""Where torch.compile and DistributedDataParallel keep the model."""


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """The model of transformers inside the wrapping of peft, torch.compile or DistributedDataParallel; DoflaError if
    there is none."""
    inner = model
    while isinstance(inner, nn.Module) and not isinstance(inner, PreTrainedModel):
        inside = inner.get_base_model() if hasattr(inner, "get_base_model") else None  # peft's
        inner = inside or next((getattr(inner, name) for name in _INSIDE if hasattr(inner, name)), None)
    if inner is None or not isinstance(inner, PreTrainedModel):
        raise DoflaError(
            f"{str(model)[:40]!r} is of {type(model).__name__}, no model of transformers: open one, for instance with "
            "AutoModelForCausalLM.from_pretrained"
        )
    return inner


def unwraps_its_model(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates what users give a model to, the first argument: it sees :func:`unwrapped`, and where it gives that
    back, they get theirs."""
    name = next(iter(signature(function).parameters))

    @wraps(function)
    def called(*args: P.args, **given: P.kwargs) -> R:
        model = args[0] if args else given.pop(name, None)
        inner = unwrapped(model)
        result = function(inner, *args[1:], **given)
        return model if result is inner else result

    return called
