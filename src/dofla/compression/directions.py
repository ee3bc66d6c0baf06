"""The directions that matter to the coded tokens of a compressed cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dofla.attention import Moments
from dofla.integration.attaching import AttachedLayer
from dofla.integration.offload import device_of, loaded
from dofla.integration.recorder import AttentionCall, recording, run_body

WINDOWS, LENGTH = 3, 2048
"""Default windows to calibrate on, and tokens of each: so long that what heads attend to far back is in them."""
LEVELS = 2**7 - 1


class Symmetric(NamedTuple):
    """Covariances, or second moments, in half of the numbers and of 8 bits: a calibration is a small file, and loses
    nothing by it (``docs/research/cache.md``)."""

    root: Tensor  # of the diagonal [H, d], float32
    above: Tensor  # what is above it, over the roots of row and column, in parts of LEVELS [H, d (d - 1) / 2], int8

    @classmethod
    def of(cls, matrices: Tensor) -> Symmetric:
        """Half of positive semidefinite matrices [H, d, d]."""
        root = matrices.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
        correlation = matrices / (root.unsqueeze(-1) * root.unsqueeze(-2)).clamp_min(1e-300)
        row, column = torch.triu_indices(root.shape[1], root.shape[1], offset=1)
        above = (LEVELS * correlation[:, row, column]).round().clamp(-LEVELS, LEVELS)
        return cls(root.float(), above.to(torch.int8))

    @property
    def whole(self) -> Tensor:
        """[H, d, d], float64. Eigenvalues below what rounding adds are set to that."""
        heads, dim = self.root.shape
        row, column = torch.triu_indices(dim, dim, offset=1)
        half = torch.zeros(heads, dim, dim, dtype=torch.float64)
        half[:, row, column] = self.above.double() / LEVELS
        values, vectors = torch.linalg.eigh(half + half.mT + torch.eye(dim, dtype=torch.float64))
        correlation = vectors * values.clamp_min(0.5 / LEVELS).unsqueeze(1) @ vectors.mT
        root = self.root.double()
        return root.unsqueeze(-1) * correlation * root.unsqueeze(-2)


def default_cut(*most: int | None) -> dict[str, Any]:
    """Length and number of the windows to calibrate on, of at ``most`` so many tokens: positions or a context."""
    length = min(LENGTH, *(tokens or LENGTH for tokens in most))
    return {"length": length, "windows": WINDOWS * LENGTH // length}


@dataclass(frozen=True)
class Directions:
    """Statistics of a layer, by KV head, that its coders are calibrated with. They do not depend on its plan."""

    queries: Symmetric  # second moments of all query heads of a KV head together
    keys: Symmetric  # covariance
    values: Symmetric  # covariance
    key_mean: Tensor  # [Hkv, d], float32
    value_mean: Tensor  # [Hkv, dv], float32
    output: str  # name of the output projection, which says what an error in a value does; empty if there is none

    @classmethod
    def of(cls, queries: Moments, keys: Moments, values: Moments, output: str) -> Directions:
        """Directions by the moments of a layer's queries, keys and values."""
        asked, of_keys, of_values = map(Symmetric.of, (queries.second, keys.covariance, values.covariance))
        return cls(asked, of_keys, of_values, keys.mean.float(), values.mean.float(), output)

    @property
    def shape(self) -> tuple[int, int, int]:
        """KV heads, and sizes of their keys and values."""
        return (*self.key_mean.shape, self.value_mean.shape[1])

    def moments(self) -> tuple[Moments, Moments, Moments]:
        """Moments of queries, which are kept without their mean, of keys and of values, as of a single token."""
        means = self.key_mean.double(), self.value_mean.double()
        squares = [
            x.whole + m.unsqueeze(-1) * m.unsqueeze(-2) for x, m in zip((self.keys, self.values), means, strict=True)
        ]
        asked = Moments(1, torch.zeros_like(means[0]), self.queries.whole)
        return asked, Moments(1, means[0], squares[0]), Moments(1, means[1], squares[1])

    def weighing(self, model: PreTrainedModel) -> Tensor | None:
        """The quadratic form [Hkv, dv, dv] by which an error in a value counts: what it does to the output. None for
        its square, where there is no output projection, or one that no number of query heads goes into."""
        heads, _, value_dim = self.shape
        if not self.output:
            return None
        weight = _matrix(model.get_submodule(self.output), device_of(model), model.dtype).double().cpu()  # [D, H · dv]
        if weight.shape[1] % (heads * value_dim):
            return None
        per_head = weight.unflatten(1, (heads, -1, value_dim))
        return torch.einsum("ohgi,ohgj->hij", per_head, per_head)

    def calibrate(self, layer: AttachedLayer, weighing: Tensor | None) -> None:
        """Give them, and :meth:`weighing`, to the coders of a compressed layer, and to what smooths its keys."""
        heads = layer.compressed
        assert heads is not None
        assert layer.smoothing is not None
        asked, of_keys, of_values = self.moments()
        layer.smoothing.calibrate(of_keys, asked)
        queries, keys = layer.smoothing.moments(asked, of_keys)
        for tier, own in zip(heads.tiers, heads.layout.heads, strict=True):
            tier.key.calibrate(keys[own], queries.second[own])
            tier.value.calibrate(of_values[own], None if weighing is None else weighing[own])


@torch.no_grad()
def measure_directions(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Tensor]],
    layers: Collection[str],
    also: Callable[[AttentionCall, int], None] = lambda call, number: None,
) -> dict[str, Directions]:
    """Measure the directions of layers, under softmax attention; the model may be converted or not.

    An error in a key counts by what queries make of it, one in a value by what the output projection does: the first
    linear layer of its module that runs after attention. Where that is none, all errors in values count alike. Some
    thousand tokens are enough. ``also`` sees each call too, and the number of its batch. DoflaError for NaN in the
    activations, with layer and batch.
    """
    found: dict[str, tuple[Moments, Moments, Moments]] = {}
    answered: list[str] = []
    number = 0

    def look(call: AttentionCall) -> None:
        call.check_finite(number)
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
        also(call, number)

    with _outputs(model, layers, answered) as outputs, recording(model, layers, look):
        for number, batch in enumerate(batches):  # noqa: B007 look sees it
            run_body(model, batch)
    names = {module: name for name, module in model.named_modules()}
    return {name: Directions.of(*found[name], names.get(outputs.get(name), "")) for name in layers}


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
                if isinstance(module, Conv1D) or hasattr(module, "in_features"):
                    stack.callback(module.register_forward_pre_hook(hook(name)).remove)
        yield found


def _matrix(linear: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The weight [outputs, inputs] of a linear layer that computes there and so, whatever it is kept in."""
    with loaded(linear):
        weight = getattr(linear, "weight", None)
        if type(weight) is nn.Parameter and weight.is_floating_point():
            return weight.detach().T if isinstance(linear, Conv1D) else weight.detach()
    inputs = torch.eye(linear.in_features, dtype=dtype, device=device)  # quantized
    with torch.no_grad():
        outputs = linear(inputs).float() - linear(torch.zeros_like(inputs[:1])).float()
    return outputs.T
