"""Measurements of a student of any family, beside its original, in float64."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from family_models import POSITIONS
from sizes import compress
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from dofla.integration.converted import Converted

LENGTH, PADDING, NEW = 120, 20, 2
PIECES = {"pieces": (60, 1, 1, 30, 1, 27), "token by token": (114, *[1] * 6)}
SMALL, ALL_HELD = 40, 2000
"""Tokens per KV head: so few that some are evicted, and so many that all stay."""


@dataclass
class Behavior:
    """A model's answers in several ways of reading, and its text.

    Attributes:
        differences: by name of :data:`PIECES`, and for padding on the left, how far logits are from those of one pass,
            relative to the largest.
        same_text: whether ``generate`` writes the same with and without a cache.
    """

    differences: dict[str, float]
    same_text: bool


def texts(model: PreTrainedModel, count: int, length: int, seed: int = 1) -> Tensor:
    """Random tokens [count, length] without special ones."""
    most = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(3, most - 1, (count, length), generator=torch.Generator().manual_seed(seed))


class AllInFloat64(TorchFunctionMode):
    """Within the block what the code of models computes in float32 whatever their dtype (routers, norms, recurrent
    states) is computed in float64."""

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if sys._getframe(1).f_globals["__name__"].startswith("transformers.models."):
            function = Tensor.double if function is Tensor.float else function
            args = tuple(map(_longer, args))
            kwargs = {name: _longer(value) for name, value in (kwargs or {}).items()}
        return function(*args, **kwargs or {})


def _longer(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """The model in float64 throughout, since two numbers that differ in the last digit may differ by a step of the
    codes; experts as well, whose kernels take no float64."""
    model.set_experts_implementation("eager")
    return model.double()


def compress_to(model: PreTrainedModel, tokens: int, head_budgets: str) -> PreTrainedModel:
    """The model with a compressed cache."""
    return compress(model, texts(model, 3, POSITIONS // 2), tokens=tokens, head_budgets=head_budgets)


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, **options) -> Tensor:
    """Logits of one pass without a cache."""
    return model(input_ids=ids, use_cache=False, **options).logits


@torch.no_grad()
def behavior(model: PreTrainedModel) -> Behavior:
    """The behavior of the model: it reads in pieces and padded, and writes."""
    ids = texts(model, 1, LENGTH, seed=2)
    whole = logits(model, ids)
    found = {name: _in_pieces(model, ids, sizes) for name, sizes in PIECES.items()} | {"padded": _padded(model, ids)}
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    written = [model.generate(ids, use_cache=cached, **options) for cached in (True, False)]
    return Behavior({way: difference(own, whole) for way, own in found.items()}, torch.equal(*written))


def difference(found: Tensor, right: Tensor) -> float:
    """The largest difference, relative to the largest number of ``right``."""
    return ((found - right).abs().max() / right.abs().max()).item()


def _in_pieces(model: PreTrainedModel, ids: Tensor, sizes: tuple[int, ...]) -> Tensor:
    cache, read = None, []
    for part in ids.split(list(sizes), dim=1):
        out = model(input_ids=part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        read.append(out.logits)
    return torch.cat(read, 1)


def _padded(model: PreTrainedModel, ids: Tensor) -> Tensor:
    ids = torch.nn.functional.pad(ids, (PADDING, 0))
    mask = (torch.arange(ids.shape[1]) >= PADDING).long()[None]
    options = {"attention_mask": mask}
    if any("position_ids" in inspect.signature(x.forward).parameters for x in (model, model.get_decoder())):
        options["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return logits(model, ids, **options)[:, PADDING:]


def divergence(model: PreTrainedModel, right: Tensor, ids: Tensor) -> float:
    """KL of the model's next tokens from those of ``right``, in nats, the mean over the text."""
    found = logits(model, ids).log_softmax(-1)
    wanted = right.log_softmax(-1)
    return (wanted.exp() * (wanted - found)).sum(-1).mean().item()


def opened_again(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model, saved and opened by its class."""
    model.save_pretrained(folder)
    return in_float64(type(model).from_pretrained(folder, dtype=torch.float64).eval())


def evicts(model: PreTrainedModel) -> bool:
    """True if each compressed layer forgets some of a text of :data:`LENGTH` tokens."""
    return all(min(map(sum, layer.sizes)) < LENGTH for layer in Converted.of(model).plan.converted)
