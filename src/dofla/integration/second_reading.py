"""A second reading of a prompt tells which tokens are needed later (KVzip, Kim et al. 2025, arXiv 2505.23416).

The first reading is the original's, into a softmax cache. On what that holds the second goes on, piece by piece, with
the same text once more. A token counts in a KV head by the sum of the squared attention weights that queries of the
second reading give it, and by nothing else.
"""

import logging
from collections.abc import Sequence
from copy import deepcopy
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from dofla.attention.importance import attention_and_importance
from dofla.errors import DoflaError
from dofla.integration.cache import CACHE_ARGUMENT, StateLayer, cache_of, state_entry
from dofla.integration.instead import computed_instead
from dofla.integration.interface import one_by_one, softmax_attention, standard_scaling
from dofla.integration.masks import plain_mask
from dofla.integration.positions import positions_of
from dofla.integration.prompt_reading import PromptReading
from dofla.integration.reading import keeps_states
from dofla.integration.recorder import evaluation_mode
from dofla.plans.layers import CompressedLayer, LayerPlan

logger = logging.getLogger(__name__)

PIECE, BEFORE = 1024, 32
"""Tokens of the second reading at a time; and tokens before them, which tell the model where in the text it is, and do
not count."""


class TwoReadings(PromptReading):
    """The softmax cache of a prompt, before tokens of it enter the cache ``into``.

    Attributes:
        first: how many tokens there are in the first reading, once it is over; until then 0.
        skipped: queries of the present piece that do not count.
        importance: of the tokens of the first reading [B, Hkv, n], by the pieces of the second so far; by the number of
            the layer.
    """

    def __init__(self, config: PreTrainedConfig, into: Cache) -> None:
        super().__init__(config=config)
        self.into, self.first, self.skipped, self.importance = into, 0, 0, dict[int, Tensor]()

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if not self.first:
            return softmax_attention(module, query, key, value, mask, **kwargs)
        mask = plain_mask(mask, module)
        query, scaling = standard_scaling(module, query, kwargs.get("scaling"))
        real = None if mask is None else mask[:, None, -key.shape[-2] :].bool()
        out, paid = attention_and_importance(query, key, value, scaling, self.first, skipped=self.skipped, real=real)
        self.importance[module.layer_idx] = self.importance.get(module.layer_idx, 0) + paid
        return out.transpose(1, 2).contiguous(), None


def check_reads_twice(model: PreTrainedModel, layers: Sequence[LayerPlan] = ()) -> None:
    """DoflaError unless a prompt of the model is text alone, which its body reads in one call, and what the ``layers``
    hold are tokens."""
    if not keeps_states(model) or model.config.get_text_config() is not model.config:
        name = type(model).__name__
        raise DoflaError(
            f"prefill is 'twice': {name} reads more than a text, or has a cache of its own kind: choose 'exact'"
        )
    if features := next((layer.name for layer in layers if not isinstance(layer, CompressedLayer)), None):
        raise DoflaError(f"prefill is 'twice': {features} holds no tokens that could be chosen: take 'exact'")


def read_first(
    model: PreTrainedModel, body: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Forward pre-hook of a converted model's body: a prompt enters a softmax cache instead of an empty one.

    One that stands in embeddings, under a mask that tells more than padding, with tokens that will be taken back, or at
    the end of the model's positions, is read once.
    """
    given = signature(body.forward).bind_partial(*args, **kwargs).arguments
    ids, cache, mask = given.get("input_ids"), cache_of(args, kwargs), given.get("attention_mask")
    if cache is None or ids is None or ids.shape[1] == 1 or one_by_one() or computed_instead(model.config):
        return None
    if int(cache.get_seq_length()) > 0 or any(isinstance(x, StateLayer) and x.record_past for x in cache.layers):
        return None
    most, plain = positions_of(model), mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)
    if not plain or (most is not None and ids.shape[1] + min(ids.shape[1], PIECE) + BEFORE > most):
        logger.warning("a prompt of %d tokens is read once: a second time it has no place in the model", ids.shape[1])
        return None
    reading = TwoReadings(model.config, cache)

    def swapped(x: Any) -> Any:
        return reading if x is cache else x

    return tuple(map(swapped, args)), {name: swapped(x) for name, x in kwargs.items()}


@torch.no_grad()
def read_second(model: PreTrainedModel, body: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of the body: read a prompt a second time, and let its most important tokens enter the caches."""
    reading = cache_of(args, kwargs)
    if not isinstance(reading, TwoReadings) or reading.first:
        return output
    given = signature(body.forward).bind_partial(*args, **kwargs).arguments
    ids, mask = given["input_ids"], given.get("attention_mask")
    real = None if mask is None or mask.all() else mask[:, : ids.shape[1]].bool()
    for layer in reading.layers:
        vars(layer).update(_detached(vars(layer)))  # what has gradients cannot be copied
    _second_reading(model, body, reading, ids, real)
    modules: dict[int, Any] = {x.layer_idx: x for x in list[Any](model.modules()) if "dofla" in x._modules}
    for index, layer in enumerate(reading.layers):
        if index in modules:
            _enter(modules[index], reading, real)
        else:
            reading.into.layers[index : index + 1] = [layer]
    if isinstance(output, tuple):
        return tuple(reading.into if x is reading else x for x in output)
    output[CACHE_ARGUMENT] = reading.into
    return output


def _detached(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: _detached(own) for name, own in x.items()}
    return x.detach() if isinstance(x, Tensor) else x


def _second_reading(
    model: PreTrainedModel, body: nn.Module, reading: TwoReadings, ids: Tensor, real: Tensor | None
) -> None:
    """Add what the second reading pays to tokens."""
    length, places, options = ids.shape[1], "position_ids" in signature(body.forward).parameters, dict[str, Tensor]()
    if real is not None:  # padding stands behind, so that pieces are those of the row alone
        order = (~real).int().argsort(dim=-1, stable=True)
        ids, again = ids.gather(1, order), real.gather(1, order)
    held, reading.first = reading.layers, length
    for start in range(0, length, PIECE):
        piece = slice(max(start - BEFORE, 0), start + PIECE)
        reading.layers, reading.skipped = deepcopy(held), start - piece.start
        if real is not None:
            options["attention_mask"] = mask = torch.cat([real, again[:, piece]], 1).long()
            if places:
                options["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)[:, length:]
        with evaluation_mode(model):
            body(ids[:, piece], use_cache=True, **{CACHE_ARGUMENT: reading}, **options)
    reading.layers = held


def _enter(module: Any, reading: TwoReadings, real: Tensor | None) -> None:
    """Let tokens of the first reading enter the state of a converted module."""
    layer, importance = reading.layers[module.layer_idx], reading.importance[module.layer_idx]
    entry = state_entry(reading.into, module)
    (key, value), weight = entry.update(layer.keys, layer.values), None
    if real is not None:  # padding is to stand in front
        order = real.int().argsort(dim=-1, stable=True)
        key, value = (x.take_along_dim(order[:, None, :, None], 2) for x in (key, value))
        importance, weight = importance.take_along_dim(order[:, None], 2), real.gather(1, order)
    options = {"weight": weight, "exact": True, "room": entry.room, "importance": importance}
    entry.states = module.dofla(key[:, :, :0], key, value, scaling=1.0, **options)[1]
