"""FSDP for a student whose layers are frozen but for what trains beside them: each process keeps its share of them on
its device, and all gather a layer while they compute it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from transformers import PreTrainedModel

from dofla.errors import DoflaError


def layers_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The layers of the model by name, in order; layers within layers are part of them."""
    # Here and not above: it may be this very module of transformers that is being imported when dofla registers.
    from transformers.modeling_layers import GradientCheckpointingLayer

    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and not any(name.startswith(f"{x}.") for x in found):
            found[name] = module
    return found


@contextmanager
def replaced(forwards: Mapping[nn.Module, Callable]) -> Iterator[None]:
    """Within the block modules have other forward functions."""
    own = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, before in own.items():
            del module.forward
            if before is not None:  # accelerate's
                module.forward = before


@contextmanager
def sharded(student: PreTrainedModel, device: torch.device) -> Iterator[None]:
    """Within the block the frozen weights of the layers are in pieces, one on the ``device`` of each process.

    What trains, and what stands outside the layers (embeddings, last norm, output layer), is whole in all of them. All
    must run the student, and take its gradients, equally often. The plain weights wait in host memory; when the block
    ends, in whatever way, the student has them again, and all of it is in host memory.

    Args:
        student: in host memory; of its parameters only those that train require gradients.
        device: of this process.

    Raises:
        DoflaError: a model without layers; torch below 2.7.
    """
    layers = layers_of(student)
    if not layers:
        raise DoflaError(f"{type(student).__name__} has no layers to take apart: launch data-parallel processes")
    shard = _fully_shard(device)
    apart = _of_one_layer(student, layers)
    whole = [parameter for parameter in student.parameters() if parameter not in apart]
    plain = {parameter: parameter.data for parameter in whole if not parameter.requires_grad}
    body = student.base_model
    try:
        for tensor in (*whole, *student.buffers()):
            tensor.data = tensor.data.to(device)
        twins = nn.ModuleList(_in_pieces(layer, apart, shard) for layer in layers.values())
        for name, twin in zip(layers, twins, strict=True):
            _put(student, name, twin)
        entrance = _Entrance(twins, body.forward)
        shard(entrance, ignored_params=set(entrance.parameters()))
        with replaced({body: entrance.__call__}):
            yield
    finally:
        for name, layer in layers.items():
            _put(student, name, layer)
        for parameter, data in plain.items():
            parameter.data = data
        student.to("cpu")  # type: ignore[arg-type] # transformers wraps it


class _Entrance(nn.Module):
    """Where every forward pass comes in. Layers of one module share the streams that gather them, and so the memory of
    what is gathered; and the next is gathered while one computes."""

    def __init__(self, layers: nn.ModuleList, run: Callable) -> None:
        super().__init__()
        self.layers, self.run = layers, run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def _fully_shard(device: torch.device) -> Callable[..., object]:
    if torch.__version__ < "2.7":  # TorchVersion compares versions, not letters
        raise DoflaError(f"torch {torch.__version__} cannot leave what trains whole: FSDP needs torch 2.7 or newer")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    return partial(fully_shard, mesh=mesh, reshard_after_forward=True)


def _of_one_layer(student: PreTrainedModel, layers: Collection[str]) -> set[nn.Parameter]:
    """The frozen parameters that one layer has and nothing else does; those without a dimension cannot be divided."""
    homes: dict[nn.Parameter, set[str]] = defaultdict(set)
    for name, parameter in student.named_parameters(remove_duplicate=False):
        homes[parameter].add(next((layer for layer in layers if name.startswith(f"{layer}.")), ""))
    return {p for p, home in homes.items() if len(home) == 1 and "" not in home and p.ndim and not p.requires_grad}


def _in_pieces(layer: nn.Module, apart: Collection[nn.Parameter], shard: Callable[..., object]) -> nn.Module:
    """A copy of the layer with its parameters ``apart`` sharded. The layer itself is not sharded, because
    ``fully_shard`` cannot undo what it does to modules and parameters."""
    own = {p: nn.Parameter(p.detach(), requires_grad=False) for p in layer.parameters() if p in apart}
    twin = _twin(layer, own)
    shard(twin, ignored_params={p for p in layer.parameters() if p not in apart})
    return twin


def _twin(module: nn.Module, own: Mapping[nn.Parameter, nn.Parameter]) -> nn.Module:
    """The module and those within as objects of their own, with ``own`` parameters; they share everything else."""
    twin = copy.copy(module)
    vars(twin).update((key, value.copy()) for key, value in vars(module).items() if isinstance(value, dict))
    twin._parameters.update((key, own.get(p, p)) for key, p in module._parameters.items() if p is not None)
    within = {child: _twin(child, own) for child in module.children()}
    twin._modules.update((key, within[child]) for key, child in module._modules.items() if child is not None)
    return twin


def _put(student: PreTrainedModel, name: str, layer: nn.Module) -> None:
    parent, _, key = name.rpartition(".")
    setattr(student.get_submodule(parent), key, layer)
