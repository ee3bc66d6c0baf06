"""Students whose weights were trained, and the weights of the teacher they came from.

A student is its own teacher as long as only feature maps are trained. Once other weights move, the original ones stay
beside them, as buffers that no checkpoint holds: ``dofla.original(student)`` computes with them, so every comparison is
still with the teacher, and ``dofla.restore(student)`` puts them back bit for bit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

_ORIGINAL = "_dofla_original_"
_LORA = "_dofla_lora"


def is_trained(model: PreTrainedModel) -> bool:
    """True if weights other than those of feature maps were trained, and the original ones are kept."""
    return hasattr(model, _LORA)


def lora_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """The low-rank factors by which the weights differ from the original ones; empty if they do not."""
    return getattr(model, _LORA, {})


def keep_original(model: PreTrainedModel, names: Iterable[str], lora: Mapping[str, Tensor]) -> None:
    """Keep the values that some parameters of a converted model have now, none of which was trained yet, as those of
    the teacher. One that several modules share has its original in all of them. ``lora`` are the factors that are about
    to be merged into them, by name."""
    copies = {id(parameter): parameter.detach().clone() for parameter in map(model.get_parameter, names)}
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) in copies:
                module.register_buffer(_ORIGINAL + key, copies[id(parameter)], persistent=False)
    setattr(model, _LORA, dict(lora))


@contextmanager
def original_weights(model: PreTrainedModel) -> Iterator[None]:
    """Within the block, and in this thread alone, the model computes with the original weights. No effect if none were
    trained."""
    own = {id(module._parameters[key]): module.get_buffer(_ORIGINAL + key) for module, key in _places(model)}
    with _Instead(own) if own else nullcontext():
        yield


class _Instead(TorchFunctionMode):
    """Within the block PyTorch's functions get other tensors than those with these ids. Only the thread that entered
    the block is in it."""

    def __init__(self, others: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.others = others

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return function(*self._of(args), **{name: self._of(value) for name, value in (kwargs or {}).items()})

    def _of(self, value: Any) -> Any:
        return type(value)(map(self._of, value)) if type(value) in (list, tuple) else self.others.get(id(value), value)


@torch.no_grad()
def put_back(model: PreTrainedModel) -> None:
    """Give the weights their original values again and forget that they ever had others."""
    for module, key in _places(model):
        module.get_parameter(key).copy_(module.get_buffer(_ORIGINAL + key))
        delattr(module, _ORIGINAL + key)
    model.__dict__.pop(_LORA, None)


def _places(model: PreTrainedModel) -> list[tuple[nn.Module, str]]:
    """Each module and the name of each of its parameters whose original is kept."""
    kept = [(module, name) for module in model.modules() for name in module._buffers if name.startswith(_ORIGINAL)]
    return [(module, name.removeprefix(_ORIGINAL)) for module, name in kept]
