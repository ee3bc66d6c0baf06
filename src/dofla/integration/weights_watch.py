"""The check that a model computes with the same weights as before, without reading all of them."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

_SAMPLED = 8
"""Numbers of each weight that are compared, at equal distances."""
_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
"""Attributes of peft's layers that say which adapters count, and how much."""

_PLAIN = (Tensor, nn.Parameter)
"""Kinds of tensors that have memory of their own; a subclass may have none."""


class WeightsWatch:
    """The weights that a model had when it was looked at last.

    What is noticed: a parameter or buffer that was written to in place (an optimizer's step, ``load_state_dict``),
    replaced, or moved; a module that was replaced; peft's adapters switched on or off, chosen, scaled or merged;
    training mode. What is written through ``weight.data`` leaves no trace, so a few numbers of each weight are
    compared as well; a change that misses all of them is not noticed.
    """

    def __init__(self) -> None:
        self._seen: list[object] = []
        self._views: list[list[Tensor]] = []
        self._numbers: list[Tensor] = []

    def changed(self, model: nn.Module) -> bool:
        """True if anything is new since the last call; True at the first."""
        seen = _marks(model)
        if seen != self._seen:
            self._seen, self._views = seen, _views(model)
            self._numbers = _numbers(self._views)
            return True
        numbers, before = _numbers(self._views), self._numbers
        self._numbers = numbers
        return any(not torch.equal(now, then) for now, then in zip(numbers, before, strict=True))


def _marks(model: nn.Module) -> list[object]:
    """Marks of a model's weights, which differ for other weights and for the same ones written to in place."""
    found: list[object] = [model.training]
    left = [model]
    while left:  # model.parameters() and model.buffers() take three times as long
        own = left.pop().__dict__
        left += [module for module in own["_modules"].values() if module is not None]
        for tensor in (*own["_parameters"].values(), *own["_buffers"].values()):
            if tensor is not None:
                found.append(tensor.data_ptr() if type(tensor) in _PLAIN else id(tensor))
                found.append(0 if tensor.is_inference() else tensor._version)
        if _ADAPTERS[0] in own:
            found.append(repr([own.get(name) for name in _ADAPTERS]))
    return found


def _views(model: nn.Module) -> list[list[Tensor]]:
    """The numbers that are compared, where they stand, in one list for each device and dtype."""
    found = defaultdict(list)
    for weight in model.parameters():
        if type(weight) in _PLAIN and weight.numel() and weight.is_contiguous() and not weight.is_meta:
            count = min(_SAMPLED, weight.numel())
            view = weight.detach().as_strided((count,), (weight.numel() // count,))
            found[weight.device, weight.dtype].append(view)
    return list(found.values())


@torch.no_grad()
def _numbers(views: list[list[Tensor]]) -> list[Tensor]:
    """The same as they are now, as bytes."""
    return [torch.cat(alike).view(torch.uint8) for alike in views]
