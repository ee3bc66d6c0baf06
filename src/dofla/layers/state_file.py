"""A file of states: its tensors by name, and the things on which their form depends."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from dofla.storage.tensors import digest

_FORMAT = "9"
"""Earlier ones had the oldest tokens of a tier first, other names, or several tensors in a compressed layer."""


def form(layers: Mapping[str, Any]) -> dict[str, str]:
    """The metadata of a file with states of a plan's ``layers``, as the plan's dictionary has them."""
    return {"format": _FORMAT, "plan": json.dumps(layers, sort_keys=True)}


def constants_of(layer: nn.Module) -> str:
    """A digest of what a layer codes with, which is another for another calibration."""
    state = layer.state_dict()
    return digest(state[name] for name in sorted(state) if state[name].dtype == torch.uint8)


def tensors_of(part: Any, where: str) -> dict[str, Tensor]:
    """All tensors of a state, or of a part of one, by name."""
    if isinstance(part, Tensor):
        return {where: part}
    if part is None:
        return {}
    return {name: t for x in fields(part) for name, t in tensors_of(getattr(part, x.name), f"{where}.{x.name}").items()}


def filled(part: Any, where: str, tensors: Mapping[str, Tensor]) -> Any:
    """The state, or a part of one, with the tensors of these names as its own; ValueError if they have other forms."""
    if isinstance(part, Tensor):
        found = tensors.get(where)
        if found is None or (found.dtype, found.shape) != (part.dtype, part.shape):
            raise ValueError(f"{where} has another form")
        return found
    if part is None:
        return None
    return replace(part, **{x.name: filled(getattr(part, x.name), f"{where}.{x.name}", tensors) for x in fields(part)})
