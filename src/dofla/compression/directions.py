"""The directions that matter to the coded tokens of a compressed cache."""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dofla.attention import Moments
from dofla.data import TokenWindows
from dofla.integration.attaching import AttachedLayer
from dofla.integration.offload import loaded
from dofla.integration.placement import placed_over
from dofla.integration.recorder import AttentionCall, recording, run_body

WINDOWS = 12
"""Default number of windows to measure directions and head budgets on; with 512 tokens each it is enough."""


@dataclass(frozen=True)
class Directions:
    """Statistics of a layer, by KV head, that its coders are calibrated with. They do not depend on its plan."""

    queries: Moments  # of all query heads of a KV head together
    keys: Moments
    values: Moments
    weighing: Tensor | None  # [Hkv, dv, dv], what an error in a value does to the output, where that is known

    @property
    def shape(self) -> tuple[int, int, int]:
        """KV heads, and sizes of their keys and values."""
        return (*self.keys.total.shape, self.values.total.shape[1])

    def calibrate(self, layer: AttachedLayer) -> None:
        """Give them to the coders of a compressed layer, and to what smooths its keys."""
        heads = layer.compressed
        assert heads is not None
        assert layer.smoothing is not None
        layer.smoothing.calibrate(self.keys)
        queries, keys = layer.smoothing.moments(self.queries, self.keys)
        for tier, own in zip(heads.tiers, heads.layout.heads, strict=True):
            tier.key.calibrate(keys[own], queries.second[own])
            tier.value.calibrate(self.values[own], None if self.weighing is None else self.weighing[own])


@torch.no_grad()
def measure_directions(
    model: PreTrainedModel,
    windows: TokenWindows,
    layers: Collection[str],
    *,
    batch_size: int = 4,
    context: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Directions]:
    """Measure the directions of layers, under softmax attention; the model may be converted or not.

    An error in a key counts by what queries make of it, one in a value by what the output projection does: the first
    linear layer of its module that runs after attention. Where that is none, all errors in values count alike. A dozen
    windows of 512 tokens are enough; they are spread over ``context`` positions, or left where they are. DoflaError for
    NaN in the activations, with layer and batch.
    """
    found: dict[str, tuple[Moments, Moments, Moments]] = {}
    answered: list[str] = []
    batch_number = 0

    def look(call: AttentionCall) -> None:
        call.check_finite(batch_number)
        answered.append(call.name)
        real = call.real_rows()
        heads = call.key.shape[1]
        vectors = [x.transpose(1, 2)[real].transpose(0, 1).cpu() for x in (call.query, call.key, call.value)]
        vectors[0] = vectors[0].unflatten(0, (heads, -1)).flatten(1, 2)
        queries, keys, values = map(Moments.of, vectors)
        if call.name in found:
            before = found[call.name]
            queries, keys, values = before[0] + queries, before[1] + keys, before[2] + values
        found[call.name] = queries, keys, values

    with _outputs(model, layers, answered) as outputs, recording(model, layers, look):
        for batch in placed_over(windows, batch_size, context):
            run_body(model, batch)
            batch_number += 1
            if progress:
                progress(batch_number, math.ceil(len(windows) / batch_size))
    return {
        name: Directions(*found[name], _weighing(outputs.get(name), *found[name][2].total.shape)) for name in layers
    }


@contextmanager
def _outputs(model: PreTrainedModel, layers: Collection[str], answered: list[str]) -> Iterator[dict[str, nn.Module]]:
    """Yield a dictionary that fills as the model runs: by layer, the first linear layer in its module that runs once
    attention has ``answered``."""
    found: dict[str, nn.Module] = {}

    def hook(name: str):
        def note(module: nn.Module, _: tuple) -> None:
            if name in answered:
                found.setdefault(name, module)

        return note

    with ExitStack() as stack:
        for name in layers:
            for module in model.get_submodule(name).modules():
                if isinstance(module, (nn.Linear, Conv1D)):
                    stack.callback(module.register_forward_pre_hook(hook(name)).remove)
        yield found


def _weighing(output: nn.Module | None, heads: int, value_dim: int) -> Tensor | None:
    """The quadratic forms [Hkv, dv, dv] that say what an error in a value does to the output."""
    weight = getattr(output, "weight", None)
    if output is None or type(weight) is not nn.Parameter or not weight.is_floating_point():
        return None  # quantized
    with loaded(output):
        weight = output.get_parameter("weight").detach().double().cpu()
    weight = weight.T if isinstance(output, Conv1D) else weight  # [D, H · dv]
    if weight.shape[1] % (heads * value_dim):
        return None
    per_head = weight.unflatten(1, (heads, -1, value_dim))
    return torch.einsum("ohgi,ohgj->hij", per_head, per_head)
