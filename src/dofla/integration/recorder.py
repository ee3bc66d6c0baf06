"""Watching an original: queries, keys and values of each layer while it runs, nothing kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from dofla.attention import LOG_ZERO, exact_scores
from dofla.data import Images, TokenWindows, batches
from dofla.errors import DoflaError
from dofla.integration.interface import is_causal, standard_scaling, visiting
from dofla.integration.offload import device_of
from dofla.integration.padding import run_padded
from dofla.layers import AttentionLayer, input_of

_ROWS_AT_A_TIME = 64


@dataclass(frozen=True)
class AttentionCall:
    """The inputs of one call of an attention module, after positions and norms were applied."""

    name: str  # of the module
    query: Tensor  # [B, H, L, d]
    key: Tensor  # [B, Hkv, L, d]
    value: Tensor  # [B, Hkv, L, dv]
    weight: Tensor | None  # [B, L] bool, False for padding; None if nothing is padded
    scaling: float  # the kernel is exp(scaling · q·k)
    causal: bool  # or bidirectional

    def check_finite(self, batch: int) -> None:
        """DoflaError naming the layer and the number of the batch if a query or key holds NaN or infinity."""
        for what, vectors in (("queries", self.query), ("keys", self.key)):
            if not torch.isfinite(vectors).all():
                raise DoflaError(f"the {what} of layer {self.name} hold NaN or infinity in batch {batch}")

    def run(self, layer: AttentionLayer) -> Tensor:
        """The output [B, H, L, dv] of a layer for this call, without a state."""
        run = partial(layer, scaling=self.scaling, causal=self.causal)
        if self.weight is None or not self.causal:
            return run(self.query, self.key, self.value, weight=self.weight)[0]
        vectors = self.query, self.key, self.value, self.weight, None
        padded = run_padded(run, vectors, None, keeps_states=False, in_place=False, join=layer.joined)
        return padded[0]

    def log_weights(self, rows: Tensor | None = None) -> Tensor:
        """Log of the original's attention [B, H, R, L] for the query rows ``rows`` [R] (default all), float32."""
        query = self.query if rows is None else self.query[:, :, rows]
        scores = exact_scores(query, self.key, self.scaling)
        return torch.log_softmax(scores.masked_fill(self.hidden(rows), LOG_ZERO), dim=-1)

    def rows_from(self, first: int) -> tuple[Tensor, ...]:
        """The query rows from ``first`` on, some at a time: the attention of all of them would be large."""
        return torch.arange(first, self.query.shape[-2], device=self.query.device).split(_ROWS_AT_A_TIME)

    def random_rows(self, count: int, generator: torch.Generator) -> Tensor:
        """``count`` different query rows (all, if there are no more) in order, drawn from a CPU generator."""
        return torch.randperm(self.query.shape[-2], generator=generator)[:count].sort().values.to(self.query.device)

    def real_rows(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """Which of the rows (default all) are no padding [B, R]."""
        shape = len(self.query), self.query.shape[-2]
        weight = torch.ones(shape, device=self.query.device) if self.weight is None else self.weight
        return weight[:, rows].bool()

    def hidden(self, rows: Tensor | None = None) -> Tensor:
        """Which keys the query rows do not see [B or 1, 1, R, L]."""
        length, device = self.key.shape[-2], self.key.device
        columns = torch.arange(length, device=device)
        rows = columns if rows is None else rows
        hidden = ((columns > rows[:, None]) & self.causal)[None, None]
        return hidden if self.weight is None else hidden | ~self.weight.bool()[:, None, None, :]


def together(calls: Sequence[AttentionCall]) -> AttentionCall:
    """Calls of one module on batches of one length, as one call."""
    query, key, value = (torch.cat([getattr(call, what) for call in calls]) for what in ("query", "key", "value"))
    weight = None
    if any(call.weight is not None for call in calls):
        ones = torch.ones(1, key.shape[-2], dtype=torch.bool, device=key.device)
        weight = torch.cat([ones.expand(len(c.key), -1) if c.weight is None else c.weight.bool() for c in calls])
    return replace(calls[0], query=query, key=key, value=value, weight=weight)


@contextmanager
def evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    """Within the block the model is in evaluation mode; afterwards each module is in the mode it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def recording(model: PreTrainedModel, names: Collection[str], visit: Callable[[AttentionCall], None]) -> Iterator[None]:
    """Within the block ``visit`` sees each call of the modules in ``names``, and the model runs softmax attention, in
    evaluation mode: an original is one without dropout."""
    by_module: dict[nn.Module, str] = {model.get_submodule(name): name for name in names}

    def forward_call(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> None:
        if module in by_module:
            mask, scaling, kwargs = others
            query, scaling = standard_scaling(module, query, scaling)
            weight = None if mask is None else mask[:, -key.shape[-2] :]
            visit(AttentionCall(by_module[module], query, key, value, weight, scaling, is_causal(module, kwargs)))

    with evaluation_mode(model), visiting(model, forward_call):
        yield


@contextmanager
def module_inputs(model: PreTrainedModel, names: Collection[str]) -> Iterator[dict[str, Tensor | None]]:
    """Within the block, the input [B, L, D] of the last call of each of these modules; None if it comes in another
    form."""
    inputs = dict[str, Tensor | None]()

    def take(name: str, _: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        inputs[name] = input_of(args, kwargs)

    with ExitStack() as stack:
        for name in names:
            hook = model.get_submodule(name).register_forward_pre_hook(partial(take, name), with_kwargs=True)
            stack.callback(hook.remove)
        yield inputs


def read_windows(
    model: PreTrainedModel,
    names: Collection[str],
    windows: TokenWindows | Images,
    batch_size: int,
    visit: Callable[[AttentionCall, Sequence[int]], None],
    progress: Callable[[str, int, int], None] | bool,
) -> None:
    """Run the model on all windows, without gradients; ``visit`` sees each call as in :func:`recording`, and the
    numbers of its windows. DoflaError for NaN or infinity in a call."""
    parts = batches(windows, batch_size)
    number = 0

    def look(call: AttentionCall) -> None:
        call.check_finite(number)
        visit(call, parts[number])

    with recording(model, names, look), torch.inference_mode():
        for number, part in enumerate(parts):
            run_body(model, windows.batch(part))
            if callable(progress):
                progress("reading", number + 1, len(parts))


def run_body(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> ModelOutput:
    """Run the model on a batch, without its head and without filling a cache.

    The head on top (a vocabulary of logits) plays no part in attention and can cost more than a layer.
    """
    options = {"use_cache": False} if getattr(model.config, "use_cache", None) is not None else {}
    return model.base_model(**fed(model, batch), **options)


def fed(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The arguments with which the model reads a batch, on its device; in an encoder-decoder, the decoder reads the
    text as well."""
    batch = {name: tensor.to(device_of(model)) for name, tensor in batch.items()}
    if not model.config.is_encoder_decoder:
        return batch
    ids = ("input_ids", "attention_mask", "position_ids")
    return {**{f"decoder_{name}": batch[name] for name in ids if name in batch}, **batch}


def mean_pooled(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of hidden states [B, L, d] over the real tokens of ``mask`` [B, L] (None: all), of length 1: [B, d]."""
    weights = torch.ones(hidden.shape[:2], device=hidden.device) if mask is None else mask.to(hidden)
    pooled = (hidden * weights.unsqueeze(-1)).sum(dim=1) / weights.sum(dim=1, keepdim=True)
    return torch.nn.functional.normalize(pooled, dim=-1)
