"""The models that this room is given, and views of them."""

from copy import copy
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from dofla.errors import DoflaError
from dofla.integration.converted import Converted, is_converted
from dofla.integration.positions import positions_of
from dofla.integration.wrapped import unwrapped

Module = TypeVar("Module", bound=nn.Module)


def writing(model: nn.Module) -> PreTrainedModel:
    """The model inside any wrapping; DoflaError for one that writes no text."""
    inner = unwrapped(model)
    if not inner.can_generate():
        raise DoflaError(f"{type(inner).__name__} writes no text: give a causal language model")
    return inner


def usable_positions(model: PreTrainedModel) -> int | None:
    """Positions that a text may take: those of the model, fewer if its cache was made for fewer; None if unknown."""
    return positions_of(model, Converted.of(model).plan.context if is_converted(model) else None)


def view(module: Module, **own: Any) -> Module:
    """A module that shares everything with another, which stays as it is, but for some attributes of its ``own``."""
    made = copy(module)
    vars(made).update(own)
    return made
