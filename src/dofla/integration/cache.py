"""The entry of a transformers cache that holds a layer's linear-attention states instead of keys and values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache, StaticLayer
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_outputs import BaseModelOutputWithPast

from dofla.attention import Carried
from dofla.errors import DoflaError
from dofla.integration.interface import LINEAR

logger = logging.getLogger(__name__)

CACHE_ARGUMENT = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The name of the cache among the arguments and results of models, which transformers 5.24 changed."""


class LinearCacheLayer(CacheLayerMixin):
    """Constant-size cache of one layer.

    ``update`` returns the new keys and values as they are; attention itself puts them into ``states``, one per group of
    heads. Counts tokens as transformers expects: in a tensor if it stands in a static cache, so that one
    compiled graph serves all of them.

    Args:
        beside_softmax: whether other layers are softmax, and masks are made for them.
        static: whether it stands in a static cache.
        positions: that there are for it, if this entry is to say when its tokens go past them.
    """

    is_compileable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, beside_softmax: bool, static: bool, positions: int | None = None) -> None:
        super().__init__()
        self.keys = self.values = torch.empty(0)  # Llama 3.2 Vision asks every entry how many there are
        self.states: Sequence[Carried] | None = None
        self.beside_softmax, self.positions = beside_softmax, positions
        self.tokens: int | Tensor = torch.tensor(0) if static else 0
        self.handed_over = False

    @property
    def bytes(self) -> int:
        """Bytes held, over the whole batch."""
        return sum(state.bytes for state in self.states or [])

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.handed_over:
            raise DoflaError(
                "the cache holds states of linear attention, which softmax attention cannot go on from: "
                "start with a fresh cache"
            )
        self.handed_over = False
        self.advance(key_states.shape[-2])
        return key_states, value_states

    def advance(self, tokens: int) -> None:
        """So many more have been read."""
        self.is_initialized = True
        before, self.tokens = self.tokens, self.tokens + tokens
        if self.positions is not None and not torch.compiler.is_compiling() and before <= self.positions < self.tokens:
            logger.warning(
                "read past the %d positions that the model has, or its memory was made for, where it fails: "
                "dofla.keep_sessions and dofla.Stream begin anew before that",
                self.positions,
            )

    # Counts of static caches are tensors in transformers, too, which types them as numbers.
    def get_seq_length(self) -> int | Tensor:  # type: ignore[override]
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int | Tensor, int]:  # type: ignore[override]
        # Without softmax layers nobody asks whether old tokens were padding, and masks are as long as the call.
        return (self.tokens if self.beside_softmax else 0) + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.states, self.tokens = None, self.tokens * 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change(lambda state: state.reorder(beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda state: state.map(lambda t: t.repeat_interleave(repeats, dim=0)))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise DoflaError(
                f"cannot take {abs(tokens_to_remove)} tokens back out of a linear-attention state: "
                "assisted decoding and rollback need softmax attention, or a copy of the cache made earlier"
            )

    def offload(self) -> None:
        """The state is small and stays where it is."""

    def prefetch(self) -> None:
        """Nothing was moved away."""

    def _change(self, fn: Callable[[Carried], Carried]) -> None:
        if self.states is not None:
            self.states = [fn(state) for state in self.states]


def hand_over_cache(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Forward pre-hook of a linearized module: give it its cache entry, swapping in ours the first time.

    Few families have a name of their own for the argument, and of those any Cache among them is taken. The entry goes
    along as one more argument, which all of them pass on to the attention function.
    """
    if module.config._attn_implementation != LINEAR:
        return None
    cache = kwargs.get(CACHE_ARGUMENT)
    if not isinstance(cache, Cache):
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if cache is None:
        return None
    return args, {**kwargs, "dofla_entry": linear_entry(cache, module)}


def linear_entry(cache: Cache, module: Any) -> LinearCacheLayer:
    """A linearized module's entry of the cache, made linear if it is still empty, and ready for the next tokens."""
    index, make = module.layer_idx, cache.layer_class_to_replicate
    while make is not None and len(cache.layers) <= index:
        cache.layers.append(make())
    entry = cache.layers[index]
    if not isinstance(entry, LinearCacheLayer):
        if isinstance(entry, CacheLayerMixin) and entry.is_initialized and entry.get_seq_length() > 0:
            raise DoflaError(
                f"the cache already holds {int(entry.get_seq_length())} tokens of softmax attention in layer {index}: "
                "start a linearized model with a fresh cache (prefix tuning, which fills it, does not work)"
            )
        beside_softmax = module.dofla.beside_softmax
        if beside_softmax and isinstance(entry, StaticLayer):
            raise DoflaError(
                "a static cache cannot serve linear and softmax layers in one model: use the dynamic cache, "
                "which is the default"
            )
        # One of them says when positions end; a static one's count is a tensor, which only its graph may ask.
        static = isinstance(entry, StaticLayer)
        silent = static or any(isinstance(other, LinearCacheLayer) for other in cache.layers)
        positions = None if silent else module.dofla.positions
        entry = cache.layers[index] = LinearCacheLayer(beside_softmax, static, positions)
    entry.handed_over = True
    return entry


def cache_bytes(cache: Cache) -> int:
    """Bytes of all keys, values and states in a transformers cache."""
    total = 0
    for entry in cache.layers:
        if isinstance(entry, LinearCacheLayer):
            total += entry.bytes
        elif isinstance(entry, CacheLayerMixin):
            total += sum(t.numel() * t.element_size() for t in (entry.keys, entry.values) if t is not None)
    return total
