"""Functions that users give a model to, around which something may have been put."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

from torch import nn
from transformers import PreTrainedModel

from dofla.display import Bar, reporting
from dofla.errors import DoflaError
from dofla.storage.defaults import torchs_defaults

F = TypeVar("F", bound=Callable[..., Any])

_INSIDE = ("_orig_mod", "module")
"""Where torch.compile and DistributedDataParallel keep the model."""


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """The model of transformers inside the wrapping of peft, torch.compile or DistributedDataParallel; DoflaError if
    there is none."""
    inner: object = model
    while isinstance(inner, nn.Module) and not isinstance(inner, PreTrainedModel):
        base = getattr(inner, "get_base_model", None)  # peft's
        inner = (base and base()) or next((getattr(inner, name) for name in _INSIDE if hasattr(inner, name)), None)
    if not isinstance(inner, PreTrainedModel):
        raise DoflaError(
            f"{str(model)[:40]!r} is of {type(model).__name__}, no model of transformers: open one, for instance with "
            "AutoModelForCausalLM.from_pretrained"
        )
    return inner


def takes_model(label: str = "", way: Callable = Bar.__call__) -> Callable[[F], F]:
    """Decorates what users give a model to, the first argument: it sees :func:`unwrapped`, and where it gives that
    back, they get theirs. Within it torch's defaults hold (:func:`torchs_defaults`).

    With a ``label``, that of a bar, it has an argument ``progress``, which may be True, the default, for a bar: within
    the function it is a function to call, or None. ``way`` is as for :func:`reporting`.
    """

    def decorate(function: F) -> F:
        name = next(iter(signature(function).parameters))

        @wraps(function)
        def called(*args: Any, **given: Any) -> Any:
            model = args[0] if args else given.pop(name, None)
            inner = unwrapped(model)
            with ExitStack() as stack:
                stack.enter_context(torchs_defaults())
                if label:
                    report = reporting(label, given.get("progress", True), way)
                    given["progress"] = stack.enter_context(report)
                result = function(inner, *args[1:], **given)
            return model if result is inner else result

        return cast("F", called)  # called in the same way: only the model is another

    return decorate
