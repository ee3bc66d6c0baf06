"""The entry of a transformers cache that holds the states of a layer instead of its keys and values."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache, StaticLayer
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_outputs import BaseModelOutputWithPast

from dofla.attention import CompressedState
from dofla.attention.state import Tensors
from dofla.errors import DoflaError
from dofla.integration.instead import DOFLA, computed_instead
from dofla.integration.prompt_reading import PromptReading
from dofla.integration.rollback import LEAST, History
from dofla.layers import input_of

logger = logging.getLogger(__name__)
_NOTHING = torch.empty(0, device="cpu")

CACHE_ARGUMENT = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The name of the cache among the arguments and results of models, which transformers 5.24 changed."""


class StateLayer(CacheLayerMixin):
    """States of a layer, in the place of its keys and values.

    ``update`` returns the new keys and values as they are; attention itself puts them into ``states``, one per group of
    heads. Where layers stand ``beside_softmax``, masks are made for those; ``positions`` are given if this entry is to
    say when its tokens go past them.
    """

    is_compileable = True
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    tokens: int | Tensor

    def __init__(self, beside_softmax: bool, positions: int | None = None) -> None:
        super().__init__()
        self.keys = self.values = _NOTHING  # Llama 3.2 Vision asks every entry how many there are
        self.states: Sequence[Tensors] | None = None
        self.beside_softmax, self.positions = beside_softmax, positions
        self.tokens, self.handed_over = 0, False
        self.history: History | None = None  # where tokens are going to be taken back
        self._differentiable: list[Tensor] | None = None  # keys, values and weights of all tokens

    @property
    def in_place(self) -> bool:
        """True if a call may overwrite the states, which belong to this entry alone. A compiled graph may not: it
        replaces them, where it is not made for a static cache."""
        return not torch.compiler.is_compiling()

    @property
    def room(self) -> int | None:
        """Tokens that states are to have room for, in heads that hold every one; None for what they have."""
        return int(self.tokens)

    @property
    def bytes(self) -> int:
        """Bytes held, over the whole batch."""
        return sum(state.bytes for state in self.states or [])

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.handed_over:
            raise DoflaError(
                "the cache was filled by a compressed or linear model, and softmax attention cannot go on from it: "
                "start with a fresh cache"
            )
        self.handed_over = False
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.advance(key_states.shape[-2])
        return key_states, value_states

    def advance(self, tokens: int) -> None:
        """So many more have been read."""
        self.is_initialized = True
        before, self.tokens = self.tokens, self.tokens + tokens
        if self.positions is not None and not torch.compiler.is_compiling() and before <= self.positions < self.tokens:
            logger.warning(
                "read past the %d positions that the model has, or its memory was made for, where it fails: "
                "dofla.serving.Session and dofla.serving.Stream begin anew before that",
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
        self._changed()
        self.states, self.tokens = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change(lambda state: state.reorder(beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda state: state.map(lambda t: t.repeat_interleave(repeats, dim=0)))

    @property
    def record_past(self) -> bool:
        """True if tokens are going to be taken back, as transformers asks and says it."""
        return self.history is not None

    @record_past.setter
    def record_past(self, record: bool) -> None:
        self.history = (self.history or History()) if record else None

    def activate_past_recording(self) -> None:
        """From now on :meth:`crop` can take back as many tokens as were read since, up to 64."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens, as many as a negative number says. Whoever asks is going to ask again."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number of tokens to remove, not {tokens_to_remove}")
        if tokens_to_remove:
            try:
                states = (self.history or History()).before(-tokens_to_remove)
            except ValueError as error:
                raise DoflaError(
                    f"cannot take {-tokens_to_remove} tokens back out of the cache, which recorded {error}: call "
                    f"cache.activate_past_recording() before they are read, take back at most {LEAST}, and give "
                    "generate an assistant_model that is not compressed"
                ) from None
            self.states, self._differentiable = states, None
            self.advance(tokens_to_remove)
        self.history = History()

    def offload(self) -> None:
        """The state is small and stays where it is."""

    def prefetch(self) -> None:
        """Nothing was moved away."""

    def differentiable(self, key: Tensor, value: Tensor, weight: Tensor | None) -> list[Tensor] | None:
        """Keys, values [B, Hkv, L, d] and weights [B, L] of all tokens read so far, those of this call last; None if
        some were read without gradients. What training holds: constant size is for reading without them."""
        here = [key, value, torch.ones_like(key[:, 0, :, 0], dtype=torch.bool) if weight is None else weight.bool()]
        if self._differentiable is not None:
            here = [torch.cat(both, dim) for *both, dim in zip(self._differentiable, here, (2, 2, 1), strict=True)]
        self._differentiable = here if here[0].shape[-2] == self.tokens else None
        return self._differentiable

    def _changed(self) -> None:
        """Other tokens are in the cache than were read last."""
        self._differentiable = None
        if self.history is not None:
            self.history = History()

    def _change(self, fn: Callable[[Tensors], Tensors]) -> None:
        self._changed()
        if self.states is not None:
            self.states = [fn(state) for state in self.states]


class StaticStateLayer(StateLayer):
    """The entry of a static cache. Counts tokens in a tensor, so that one compiled graph serves all of them. On a GPU,
    the state and the count stay at their addresses: CUDA graphs replay kernels that read and update them there. Tokens
    cannot be taken back."""

    is_croppable = False

    def __init__(self, beside_softmax: bool, length: int) -> None:
        self._rows: Tensor | None = None  # of a compressed cache, at their address
        self._in_rows = False
        self._states: Sequence[Tensors] | None = None
        super().__init__(beside_softmax)
        self.tokens, self.length = torch.tensor(0), length

    @property
    def room(self) -> int | None:
        return None if self.states else self.length  # at their address, and in a graph, they stay as large as they are

    @property
    def states(self) -> Sequence[Tensors] | None:  # type: ignore[override]
        return self._states if self._rows is None or not self._in_rows else [CompressedState(self._rows)]

    @states.setter
    def states(self, states: Sequence[Tensors] | None) -> None:
        if torch.compiler.is_compiling():
            if self._rows is None or not self._in_rows:  # otherwise they were updated there
                self._states = states
            return
        first = states[0] if states else None
        self._in_rows = isinstance(first, CompressedState) and in_cuda_graphs(first.rows)
        self._states = None if self._in_rows else states
        if not self._in_rows or not isinstance(first, CompressedState):
            return
        if self._rows is None or self._rows.shape != first.rows.shape:
            with torch.inference_mode(False):  # what is made in that mode cannot be updated outside of it
                self._rows = torch.empty_like(first.rows)
            torch._dynamo.mark_static_address(self._rows)
        if first.rows.data_ptr() != self._rows.data_ptr():
            self._rows.copy_(first.rows)

    @property
    def in_place(self) -> bool:
        # Not by super(), which torch.compile asks outside of the graph, where nothing is compiling.
        return (self._rows is not None and self._in_rows) or not torch.compiler.is_compiling()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        if in_cuda_graphs(key_states) and not torch.compiler.is_compiling():
            with torch.inference_mode(False):
                self.tokens = torch.full((), int(self.tokens), device=key_states.device)
            torch._dynamo.mark_static_address(self.tokens)

    def advance(self, tokens: int) -> None:
        self.is_initialized = True
        if isinstance(self.tokens, Tensor) and in_cuda_graphs(self.tokens):
            self.tokens.add_(tokens)
        else:
            self.tokens = self.tokens + tokens

    def reset(self) -> None:
        self.states = None
        self.advance(-int(self.tokens))


def in_cuda_graphs(x: Tensor) -> bool:
    """True if compiled calls with such a tensor are CUDA graphs."""
    return x.is_cuda


def hand_over_cache(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Forward pre-hook of a converted module: give it its cache entry, swapping in ours the first time. The entry goes
    along as one more argument, which all families pass on to the attention function; with several tokens, so does what
    the module reads."""
    if module.config._attn_implementation != DOFLA or computed_instead(module.config):
        return None
    cache = cache_of(args, kwargs)
    if cache is None:
        return None
    given = {**kwargs, "dofla_entry": cache if isinstance(cache, PromptReading) else state_entry(cache, module)}
    hidden = input_of(args, kwargs)
    if hidden is not None and hidden.shape[1] > 1 and not torch.compiler.is_compiling():
        given["dofla_hidden"] = hidden
    return args, given


def record_candidates(model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a converted model: assisted decoding, which asks for the logits of several tokens, will take
    some of them back. Its first call comes before there are entries that it could tell."""
    several = kwargs.get("logits_to_keep")
    if not isinstance(several, int) or several < 2 or computed_instead(model.config):
        return
    cache = cache_of(args, kwargs)
    for module in model.modules():
        if cache is not None and "dofla" in module._modules:
            state_entry(cache, module).activate_past_recording()


def cache_of(args: tuple, kwargs: dict[str, Any]) -> Cache | None:
    """The decoder's cache among the arguments of a module. Few families have a name of their own for it, and of those
    any Cache is taken."""
    cache = kwargs.get(CACHE_ARGUMENT)
    if not isinstance(cache, Cache):
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def state_entry(cache: Cache, module: Any) -> StateLayer:
    """A converted module's entry of the cache, made one if it is still empty, and ready for the next tokens."""
    index, make = module.layer_idx, cache.layer_class_to_replicate
    while make is not None and len(cache.layers) <= index:
        cache.layers.append(make())
    entry = cache.layers[index]
    if not isinstance(entry, StateLayer):
        if isinstance(entry, CacheLayerMixin) and entry.is_initialized and entry.get_seq_length() > 0:
            raise DoflaError(
                f"the cache already holds {int(entry.get_seq_length())} tokens of softmax attention in layer {index}: "
                "give a compressed or linear model a fresh cache (prefix tuning, which fills it, does not work)"
            )
        beside_softmax = module.dofla.beside_softmax
        if beside_softmax and isinstance(entry, StaticLayer):
            raise DoflaError(
                "a static cache cannot serve a model some layers of which are softmax: use the dynamic cache, "
                "which is the default"
            )
        if isinstance(entry, StaticLayer):
            entry = StaticStateLayer(beside_softmax, entry.max_cache_len)
        else:  # one of them says when positions end
            silent = any(isinstance(other, StateLayer) for other in cache.layers)
            entry = StateLayer(beside_softmax, None if silent else module.dofla.positions)
        cache.layers[index] = entry
    entry.handed_over = True
    return entry


def cache_bytes(cache: Cache) -> int:
    """Bytes of all keys, values and states in a transformers cache."""
    total = 0
    for entry in cache.layers:
        if isinstance(entry, StateLayer):
            total += entry.bytes
        elif isinstance(entry, CacheLayerMixin):
            total += sum(t.numel() * t.element_size() for t in (entry.keys, entry.values) if t is not None)
    return total
