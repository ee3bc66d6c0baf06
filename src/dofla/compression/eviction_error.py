"""The error of eviction in each KV head, by forward passes of the original alone.

While the original reads a window, some queries of each head are also answered from the tokens that a cache would have
kept: the first, the newest, and those of the largest attention scores so far. The error counts by what becomes of it in
the residual stream: through the output projection, and what normalizes its output, relative to the size of the stream
there. On SmolLM2 budgets by this error lose as little as by its gradient of the loss, and need none
(``docs/research/cache.md``).
"""

import math
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dofla.integration.recorder import AttentionCall

FRACTIONS = 1 / 4, 1 / 8
"""Tokens of a head's cache over those of a window: errors with several are added."""
LEAST_TOKENS = 4
"""Tokens below which a cache has no room for a token of each kind."""
SINKS, WINDOW = 2, 0.14
"""The first tokens, and the newest as a fraction of the cache, that are kept whatever their scores."""
BLOCKS, EVERY = 32, 4
"""A window is read in so many blocks, at whose beginnings tokens are evicted; of its queries one in so many counts."""


@dataclass
class Stream:
    """The sizes of the residual stream around an attention module, as sums over batches."""

    batches: int = 0
    square: float = 0.0  # of a token's vector after the module's layer, the median over tokens
    before: float = 0.0  # of the module's output
    after: float = 0.0  # of what is added to the stream: the same, but where another module normalizes it

    @property
    def weight(self) -> float:
        """The square that an error in the module's output is of the stream's, per square of the error."""
        return self.batches * self.after / self.before / self.square if self.before and self.square else 1.0


@dataclass
class EvictionErrors:
    """A visitor of attention calls that collects what eviction does to their answers."""

    errors: dict[str, Tensor] = field(default_factory=dict)  # Σ δ δᵀ of answers by KV head [Hkv, dv, dv], float64

    def __call__(self, call: AttentionCall) -> None:
        """Add the errors of a call."""
        heads, length, dim = call.key.shape[1], call.key.shape[2], call.value.shape[3]
        step = max(1, length // BLOCKS)
        score = torch.zeros(len(call.key), heads, length, device=call.key.device, dtype=torch.float32)
        total = torch.zeros(heads, dim, dim, dtype=torch.float64)
        for first in range(0, length, step):
            end = min(length, first + step)
            rows = torch.arange(end - 1, first - 1, -EVERY, device=call.key.device)
            seen = replace(call, key=call.key[:, :, :end], value=call.value[:, :, :end])
            seen = replace(seen, weight=None if call.weight is None else call.weight[:, :end])
            attention = seen.log_weights(rows).exp() * call.real_rows(rows)[:, None, :, None]
            attention = attention.unflatten(1, (heads, -1))  # [B, Hkv, G, R, end]
            value = seen.value.unsqueeze(2).to(attention.dtype)
            for tokens in (math.floor(part * length) for part in FRACTIONS):
                if LEAST_TOKENS <= tokens <= first:
                    kept = attention * _retained(score[..., :first], tokens, end)[:, :, None, None]
                    answered = kept / kept.sum(-1, keepdim=True).clamp_min(torch.finfo(kept.dtype).tiny)
                    error = (answered - attention) @ value
                    total += torch.einsum("bkgri,bkgrj->kij", error, error).double().cpu() / (length - tokens)
            score[..., :end] += attention.sum((2, 3))
        self.errors[call.name] = self.errors.get(call.name, 0) + total

    def cost(self, name: str, weighing: Tensor | None, stream: Stream) -> list[float]:
        """The cost of eviction in each KV head of a layer; ``weighing`` [Hkv, dv, dv] is the quadratic form by which an
        error in a value counts (default: its square)."""
        errors = self.errors[name]
        of_heads = errors.diagonal(dim1=1, dim2=2).sum(-1) if weighing is None else (weighing * errors).sum((1, 2))
        return (stream.weight * of_heads).tolist()


def _retained(score: Tensor, tokens: int, end: int) -> Tensor:
    """Which of the first ``end`` tokens a cache of so many ``tokens`` holds [B, Hkv, end], in float32; of those with a
    ``score`` [B, Hkv, first], and all later ones."""
    first = score.shape[-1]
    score = score.clone()
    score[..., :SINKS] = math.inf
    score[..., first - max(1, round(WINDOW * tokens)) :] = math.inf
    kept = torch.zeros(*score.shape[:2], end, device=score.device)
    kept[..., first:] = 1
    return kept.scatter_(2, score.topk(tokens, dim=-1).indices, 1.0)


@contextmanager
def streams(model: PreTrainedModel, names: Collection[str]) -> Iterator[dict[str, Stream]]:
    """Within the block the sizes of the residual stream around these attention modules are measured, by name."""
    found = {name: Stream() for name in names}
    with ExitStack() as stack:
        for name, stream in found.items():
            module, layer = model.get_submodule(name), _layer_of(model, name)
            if layer is not None:
                for hook in _hooks(stream, module, layer):
                    stack.callback(hook.remove)
        yield found


def _hooks(stream: Stream, module: nn.Module, layer: nn.Module) -> Iterator[Any]:
    outputs: list[Tensor] = []

    def leave(_: nn.Module, inputs: tuple, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor):
            stream.batches += 1
            stream.square += hidden.float().square().sum(-1).median().item()

    def answer(_: nn.Module, inputs: tuple, output: Any) -> None:
        outputs[:] = [output[0] if isinstance(output, tuple) else output]
        size = outputs[0].float().square().mean().item()
        stream.before, stream.after = stream.before + size, stream.after + size

    def normalize(_: nn.Module, inputs: tuple, output: Any) -> None:
        if inputs and outputs and inputs[0] is outputs[0] and isinstance(output, Tensor):
            before, after = (x.float().square().mean().item() for x in (outputs.pop(), output))
            stream.after += after - before

    yield layer.register_forward_hook(leave)
    yield module.register_forward_hook(answer)
    for other in layer.children():
        if other is not module:
            yield other.register_forward_hook(normalize)


def _layer_of(model: nn.Module, name: str) -> nn.Module | None:
    """The layer that a module of this name is in: the innermost element of a list of modules; None if there is none."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if isinstance(model.get_submodule(".".join(parts[: end - 1])), nn.ModuleList):
            return model.get_submodule(".".join(parts[:end]))
    return None
