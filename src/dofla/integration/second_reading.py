"""A second reading of a prompt tells which tokens are needed later (KVzip, Kim et al. 2025, arXiv 2505.23416).

The first reading is the original's, into a softmax cache. On what that holds the second goes on, piece by piece, with
the same text once more. A token counts in a KV head by the sum of the squared attention weights that queries of the
second reading give it, and by nothing else.
"""

import logging
from collections.abc import Sequence
from copy import copy, deepcopy
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, DynamicLayer, PreTrainedConfig, PreTrainedModel

from dofla.attention.importance import attention_and_importance
from dofla.errors import DoflaError
from dofla.integration.cache import CACHE_ARGUMENT, StateLayer, cache_of, state_entry
from dofla.integration.instead import DOFLA, computed_instead
from dofla.integration.interface import one_by_one, softmax_attention, standard_scaling
from dofla.integration.masks import plain_mask
from dofla.integration.positions import is_rotary, new_factors_at, positions_of, table_of_positions
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
        tokens: of the first reading, once it is over; until then 0.
        skipped: queries of the present piece of the second reading that do not count.
        vectors: by the number of the layer, no queries [B, H, 0, d], and keys and values of the first reading as
            attention gets them, which those of the cache need not be (latent attention).
        importance: by the number of the layer, of the tokens of the first reading [B, Hkv, n], by the pieces of the
            second so far.
    """

    def __init__(self, config: PreTrainedConfig, into: Cache) -> None:
        super().__init__(config=config)
        self.into, self.tokens, self.skipped = into, 0, 0
        self.vectors, self.importance = dict[int, tuple[Tensor, Tensor, Tensor]](), dict[int, Tensor]()

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Softmax attention; on the second reading, tokens of the first get their importance."""
        index, mask = module.layer_idx, plain_mask(mask, module)
        if not self.tokens:
            self.vectors[index] = query[:, :, :0], key, value
            return softmax_attention(module, query, key, value, mask, **kwargs)
        query, scaling = standard_scaling(module, query, kwargs.get("scaling"))
        real = None if mask is None else mask[:, None, -key.shape[-2] :].bool()
        out, paid = attention_and_importance(query, key, value, scaling, self.tokens, skipped=self.skipped, real=real)
        self.importance[index] = self.importance.get(index, 0) + paid
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

    One that stands in embeddings, or whose tokens will be taken back, is read once; after a warning also one that
    :func:`_obstacle` finds something against.
    """
    ids, cache = kwargs.get("input_ids", args[0] if args else None), cache_of(args, kwargs)
    if ids is None or ids.shape[1] == 1 or cache is None or one_by_one() or computed_instead(model.config):
        return None
    if model.config._attn_implementation != DOFLA or int(cache.get_seq_length()) > 0:
        return None
    if any(isinstance(entry, StateLayer) and entry.record_past for entry in cache.layers):
        return None
    given = signature(body.forward).bind_partial(*args, **kwargs).arguments
    if (obstacle := _obstacle(model, cache, **{**given.pop("kwargs", {}), **given})) is not None:
        logger.warning("a prompt of %d tokens is read once, exactly: %s", ids.shape[1], obstacle)
        return None
    reading = TwoReadings(model.config, cache)

    def swapped(x: Any) -> Any:
        return reading if x is cache else x

    return tuple(map(swapped, args)), {name: swapped(x) for name, x in kwargs.items()}


def _obstacle(
    model: PreTrainedModel,
    into: Cache,
    *,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> str | None:
    """The reason why a prompt cannot be read twice, if there is one."""
    length, most, change = input_ids.shape[1], positions_of(model), new_factors_at(model.config)
    last = length + min(length, PIECE + BEFORE)
    if (most is not None and last > most) or (change is not None and length <= change < last):
        return "a second time it has no place among the model's positions"
    if attention_mask is not None and (not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2):
        return "its mask tells more than padding"
    if position_ids is None and attention_mask is not None and not attention_mask.all() and not is_rotary(model):
        return "it is padded, and without position_ids it is not known where tokens stand"
    if position_ids is not None and position_ids.ndim != 2:
        return "its positions have several dimensions"
    if more := [name for name, x in others.items() if isinstance(x, Tensor) and x.shape[:2] == input_ids.shape]:
        return f"its tokens have {more[0]}"
    if type(into) is DynamicCache or not any(x._modules["dofla"].beside_softmax for x in _converted(model).values()):
        return None
    return f"layers stay softmax, and the cache is a {type(into).__name__} instead of a DynamicCache"


def _converted(model: PreTrainedModel) -> dict[int, Any]:
    """The converted modules by the numbers of their layers."""
    return {module.layer_idx: module for module in list[Any](model.modules()) if "dofla" in module._modules}


@torch.no_grad()
def read_second(model: PreTrainedModel, body: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of the body: read a prompt a second time, and let its most important tokens enter the caches."""
    reading = cache_of(args, kwargs)
    if not isinstance(reading, TwoReadings) or reading.tokens:
        return output
    if reading.get_seq_length():  # gradient checkpointing lets nothing enter a cache
        given, converted = signature(body.forward).bind_partial(*args, **kwargs).arguments, _converted(model)
        ids, mask = given["input_ids"], given.get("attention_mask")
        real = None if mask is None or mask.all() else mask[:, : ids.shape[1]].bool()
        _read_again(model, body, reading, ids, real, given.get("position_ids"))
        for index, layer in enumerate(reading.layers):
            if index in converted:
                _enter(converted[index], reading, real)
            else:  # a softmax layer's own, in the place of an empty one, or behind all others
                reading.into.layers[index : index + 1] = [layer]
    if isinstance(output, tuple):
        return tuple(reading.into if x is reading else x for x in output)
    output[CACHE_ARGUMENT] = reading.into
    return output


def _read_again(
    model: PreTrainedModel,
    body: nn.Module,
    reading: TwoReadings,
    ids: Tensor,
    real: Tensor | None,
    positions: Tensor | None,
) -> None:
    """The second reading, behind the last token of the first."""
    length, options, table = ids.shape[1], dict[str, Tensor](), table_of_positions(model)
    last = torch.full((len(ids), 1), length - 1, device=ids.device)
    if real is not None:
        last = last - real.flip(1).int().argmax(1, keepdim=True)
        order = (~real).int().argsort(dim=-1, stable=True)  # padding behind, so that pieces are those of the row alone
        ids, again = ids.gather(1, order), real.gather(1, order)
    # RoBERTa and its kin begin at a number of their own, where no positions are given.
    own = positions is None and table is not None and table.padding_idx is not None
    places = "position_ids" in signature(body.forward).parameters and not own
    begin = 1 + (last if positions is None else positions.expand(len(ids), -1).gather(1, last))
    held, reading.tokens = reading.layers, length
    for start in range(0, length, PIECE):
        piece = slice(max(start - BEFORE, 0), min(start + PIECE, length))
        reading.layers, reading.skipped = [_copied(layer) for layer in held], start - piece.start
        if real is not None:
            options["attention_mask"] = torch.cat([real, again[:, piece]], 1).long()
        if places:
            options["position_ids"] = begin + torch.arange(piece.stop - piece.start, device=ids.device)
        with evaluation_mode(model):
            body(ids[:, piece], use_cache=True, **{CACHE_ARGUMENT: reading}, **options)
    reading.layers = held


def _copied(layer: Any) -> Any:
    """A layer that can be read into while the other stays as it is."""
    own = copy(layer)
    if type(layer) is not DynamicLayer:  # which writes nothing in place
        vars(own).update(deepcopy(_detached(vars(layer))))  # tensors with gradients are not copied
    return own


def _detached(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: _detached(own) for name, own in x.items()}
    return x.detach() if isinstance(x, Tensor) else x


def _enter(module: Any, reading: TwoReadings, real: Tensor | None) -> None:
    """Let tokens of the first reading enter the state of a converted module."""
    (nobody, *tokens), importance = reading.vectors[module.layer_idx], reading.importance[module.layer_idx]
    entry, weight = state_entry(reading.into, module), None
    key, value = entry.update(*tokens)
    if real is not None:  # padding is to stand in front
        real = real.to(key.device)
        order = real.int().argsort(dim=-1, stable=True)
        key, value = (x.take_along_dim(order[:, None, :, None], 2) for x in (key, value))
        importance, weight = importance.take_along_dim(order[:, None], 2), real.gather(1, order)
    options = {"weight": weight, "exact": True, "room": entry.room, "importance": importance}
    entry.states = module.dofla(nobody, key, value, scaling=1.0, **options)[1]
