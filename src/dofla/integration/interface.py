"""The functions that transformers calls: attention and mask functions, registered under dofla's names."""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dofla.errors import DoflaError
from dofla.integration.padding import run_padded
from dofla.integration.positions import stated_positions
from dofla.integration.rollback import LEAST, Vectors, cut
from dofla.layers import AttentionLayer

LINEAR = "dofla"
RECORDING = "dofla_recording"

Visitor = Callable[..., None]
_token_by_token: ContextVar[bool] = ContextVar("dofla_token_by_token", default=False)
_visitor: ContextVar[tuple[Visitor | None, Callable] | None] = ContextVar("dofla_visitor", default=None)
_instead: ContextVar[Mapping[int, str]] = ContextVar("dofla_instead", default={})  # noqa: B039 never changed
"""The attention that models compute instead of dofla's, by the id of their config."""


def dofla_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    dofla_entry: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of converted modules by their layers, of all others by softmax.

    ``dofla_entry`` is the entry of the cache that the layer reads and writes, or None. Dropout of attention weights has
    no counterpart here, as no weight is ever formed, and is left out.
    """
    if name := computed_instead(module.config):
        run = ALL_ATTENTION_FUNCTIONS.get(name) or _eager_of(module)
        return run(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    layer = module._modules.get("dofla")  # as an attribute of a module it takes ten times as long to find
    if not isinstance(layer, AttentionLayer):
        return softmax_attention(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    attention_mask = plain_mask(attention_mask, module)
    causal = is_causal(module, kwargs)
    states = None if dofla_entry is None else dofla_entry.states
    if attention_mask is not None and attention_mask.ndim != 2:
        attention_mask = _padding_of(attention_mask, query, key, causal and not states, layer.name)
    if kwargs.get("output_attentions"):
        raise DoflaError("output_attentions: no attention weights are formed; use dofla.original(model)")
    asked, own_scaling = standard_scaling(module, query, scaling)
    weight = None if attention_mask is None else attention_mask[:, -key.shape[-2] :]
    tensors = (query, key, value, *layer.parameters()) if torch.is_grad_enabled() else ()
    trained = [x for x in tensors if x.requires_grad]
    without_gradients = bool(trained) and (bool(states) or layer.compressed is not None)
    with torch.no_grad() if without_gradients else nullcontext():
        room = None if dofla_entry is None else dofla_entry.room
        outside = torch.compiler.is_compiling() and (
            (dofla_entry is not None and dofla_entry.history is not None)
            or not layer.traceable(asked, key, value, weight=weight, states=states, causal=causal, room=room)
        )
        run = _outside_the_graph if outside else _run
        exact = _prefills_exactly(layer, query, dofla_entry)
        out = run(layer, dofla_entry, asked, key, value, scaling=own_scaling, weight=weight, causal=causal, exact=exact)
    out = out.transpose(1, 2).contiguous()
    if not without_gradients:
        return out, None
    seen: Any = key, value, attention_mask
    if dofla_entry is not None and layer.compressed is not None:
        seen = dofla_entry.differentiable(key, value, weight)
    if seen is None or (states and layer.compressed is None):
        return _Detached.apply(out, *trained), None
    # A compressed cache has no parameters: gradients are those of softmax attention of all tokens. A straight-through
    # estimator (arXiv 1308.3432): what ``out`` does not see, the gradient sees.
    keys, values, mask = seen
    smooth, _ = softmax_attention(module, query, keys, values, mask, scaling=scaling, **kwargs)
    return out + (smooth - smooth.detach()), None


def _run(
    layer: nn.Module,
    entry: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    weight: Tensor | None,
    exact: bool,
    **options: Any,
) -> Tensor:
    """The layer's output; the states after go into the entry of the cache, if there is one."""
    vectors = query, key, value, weight
    if entry is None:
        return _read(layer, vectors, None, keeps_states=False, exact=exact, **options)[0]
    read: Callable[..., Any] = partial(_read, layer, keeps_states=True, room=entry.room, **options)
    if entry.history is None:
        out, entry.states = read(vectors, entry.states, exact=exact, in_place=entry.in_place)
        return out
    # Tokens that may be taken back come one by one, as they would without: however a text is cut, states are the same.
    length, again, outputs = key.shape[-2], lambda *before: read(*before, in_place=True)[1], []
    for part in (slice(0, max(length - LEAST, 0)), slice(max(length - LEAST, 0), length)):
        if part.start < part.stop:
            own = cut(vectors, part)
            if part.stop == length:
                entry.history.add(entry.states, own, again)
            out, entry.states = read(own, entry.states, exact=exact and part.stop < length, in_place=entry.in_place)
            outputs.append(out)
    return torch.cat(outputs, 2)


def _read(
    layer: nn.Module,
    vectors: Vectors,
    states: Any,
    *,
    causal: bool,
    keeps_states: bool,
    in_place: bool = False,
    **options: Any,
) -> tuple[Tensor, Any]:
    """The layer's output, and the states after."""
    query, key, value, weight = vectors
    run = partial(layer, in_place=in_place, **options)
    if weight is None or not causal:
        return run(query, key, value, weight=weight, states=states, causal=causal)
    return run_padded(run, query, key, value, weight, states, keeps_states=keeps_states, in_place=in_place)


_outside_the_graph = torch.compiler.disable(_run)


class _Detached(torch.autograd.Function):
    """Output of a call with earlier tokens, whose gradients a state does not hold."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise DoflaError(
            "no gradients pass through a cache that holds tokens read without gradients, or of feature maps: give the "
            "whole text in one call, without a cache"
        )


def _prefills_exactly(layer: nn.Module, query: Tensor, entry: Any) -> bool:
    """True if the call is an exact prefill. Without a cache it is none, so that a single pass over a text, as
    evaluation and training make it, gives what decoding the text would give."""
    if entry is None or query.shape[-2] == 1 or torch.compiler.is_compiling() or _token_by_token.get():
        return False
    return layer.prefill == "exact" or (layer.prefill == "auto" and query.is_cuda)


@contextmanager
def token_by_token() -> Iterator[None]:
    """Within the block no prefill is exact: several tokens at once give what one after the other gives."""
    token = _token_by_token.set(True)
    try:
        yield
    finally:
        _token_by_token.reset(token)


@torch.compiler.disable
def recording_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention that shows its inputs to the visitor of :func:`visiting` first."""
    if computed_instead(module.config):
        return dofla_attention(module, query, key, value, attention_mask, **kwargs)
    visit, run = _visitor.get() or (None, softmax_attention)
    attention_mask = plain_mask(attention_mask, module)
    if visit is not None:
        visit(module, query, key, value, attention_mask, kwargs.get("scaling"), kwargs)
    return run(module, query, key, value, attention_mask, **kwargs)


@contextmanager
def computing(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Within the block, and in this thread alone, a converted model computes the attention registered as ``name``.

    Compiled graphs have the attention that they were traced with: no thread uses any meanwhile.
    """
    token = _instead.set({**_instead.get(), **dict.fromkeys(_configs(model), name)})
    _no_graphs.enter()
    try:
        yield
    finally:
        _no_graphs.leave()
        _instead.reset(token)


def computed_instead(config: object) -> str | None:
    """The name of the attention that models with this config compute in this thread; None if it is dofla's."""
    return None if torch.compiler.is_compiling() else _instead.get().get(id(config))


def _configs(model: PreTrainedModel) -> set[int]:
    """The ids of the configs of a model and its parts."""
    return {id(own) for module in model.modules() if (own := getattr(module, "config", None)) is not None}


class _NoGraphs:
    """From the first that enters to the last that leaves, in any thread, compiled models run without their graphs."""

    def __init__(self) -> None:
        self.lock, self.inside, self.stance = threading.Lock(), 0, ExitStack()

    def enter(self) -> None:
        with self.lock:
            self.inside += 1
            if self.inside == 1 and "torch._dynamo" in sys.modules:  # else nothing is compiled
                self.stance.enter_context(torch.compiler.set_stance("force_eager"))

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                self.stance.close()


_no_graphs = _NoGraphs()


def unreachable(model: PreTrainedModel) -> str:
    """The error of a model whose attention is none of transformers' implementations."""
    return (
        f"{type(model).__name__} has no attention that goes through transformers' attention interface: "
        "models with their own attention code (BLOOM, Falcon, MPT, ...) cannot be converted"
    )


@contextmanager
def visiting(model: PreTrainedModel, visitor: Visitor | None, run: Callable | None = None) -> Iterator[None]:
    """Within the block, ``visitor`` sees every call of the model's attention, which goes on with ``run``; default
    softmax attention."""
    before, configs = model.config._attn_implementation, _configs(model)
    model.set_attn_implementation(RECORDING)
    others = _instead.set({own: other for own, other in _instead.get().items() if own not in configs})
    token = _visitor.set((visitor, run or softmax_attention))
    try:
        if model.config._attn_implementation != RECORDING:
            raise DoflaError(unreachable(model))
        yield
    finally:
        _visitor.reset(token)
        _instead.reset(others)
        model.set_attn_implementation(before)


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The [B, kv_length] padding mask (None if nothing is padded) for plain causal or bidirectional attention.

    Any other pattern (sliding windows, chunks, packed sequences) becomes a full four-dimensional mask, which softmax
    layers use and linear layers refuse.
    """
    positions = batch_size, q_length, kv_length, q_offset, kv_offset
    if name := computed_instead(kwargs.get("config")):
        if name not in ALL_MASK_ATTENTION_FUNCTIONS:
            return attention_mask
        return ALL_MASK_ATTENTION_FUNCTIONS[name](*positions, mask_function, attention_mask=attention_mask, **kwargs)
    if mask_function in (causal_mask_function, bidirectional_mask_function) or _bounds_nothing(q_length, kwargs):
        if attention_mask is None:
            return None
        length = kv_length if mask_function is bidirectional_mask_function else q_offset + q_length
        attention_mask = _reaching(attention_mask, length, q_length, kv_length)
        if not torch.compiler.is_compiling() and attention_mask.all():  # a graph cannot ask
            return None
        return attention_mask[:, None, None] if _has_readers(kwargs.get("config")) else attention_mask
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(*positions, mask_function, attention_mask=attention_mask, **kwargs)


def _reaching(mask: Tensor, length: int | Tensor, q_length: int, kv_length: int) -> Tensor:
    """A padding mask of the last ``kv_length`` of ``length`` tokens. Tokens that it does not reach are padding, as in
    transformers' own masks; but one of the new tokens alone is taken as such where they are all that is asked for."""
    if isinstance(length, Tensor):
        length = mask.shape[1] if torch.compiler.is_compiling() else int(length)  # a graph cannot ask
    if not mask.shape[1] == q_length == kv_length:
        mask = F.pad(mask, (0, max(length - mask.shape[1], 0)))
    return mask[:, -kv_length:]


def _bounds_nothing(q_length: int, options: Mapping[str, Any]) -> bool:
    """True if the pattern is a causal window or chunk as long as all positions, and nothing else. transformers allows
    no skip, and says so with ``use_vmap``, where something was added; for one token it allows none in any case."""
    local_size, config = options.get("local_size"), options.get("config")
    if local_size is None or config is None or options.get("allow_is_bidirectional_skip") is not None:
        return False
    positions = stated_positions(config)
    if positions is None or local_size < positions or options.get("use_vmap", False):
        return False
    return options.get("allow_is_causal_skip", False) or q_length == 1


def _has_readers(config: Any) -> bool:
    """True if layers read the keys of others. Such models cut the third dimension of masks (Gemma 4)."""
    return bool(getattr(config, "num_kv_shared_layers", 0))


def plain_mask(mask: Tensor | None, module: nn.Module) -> Tensor | None:
    """The mask that a module got, [B, keys] if it is one of padding."""
    if mask is not None and mask.ndim == 4 and mask.shape[1:3] == (1, 1) and _has_readers(module.config):
        return mask[:, 0, 0]
    return mask


def softmax_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention under the masks of :func:`padding_mask`: SDPA, or the family's own eager function where its
    arithmetic is special (soft-capped logits, sinks as parameters)."""
    attention_mask = plain_mask(attention_mask, module)
    if attention_mask is None or attention_mask.ndim == 2:
        attention_mask = _full_mask(attention_mask, query, key, is_causal(module, kwargs))
    if kwargs.get("softcap") is None and kwargs.get("s_aux") is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if attention_mask is None:
        attention_mask = _visible(query, key)
    if attention_mask.dtype == torch.bool:
        hidden = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, hidden)
    return _eager_of(module)(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)


def _eager_of(module: nn.Module) -> Callable:
    """The plain attention function of a module's family."""
    return sys.modules[type(module).__module__].eager_attention_forward


def _full_mask(padding: Tensor | None, query: Tensor, key: Tensor, causal: bool) -> Tensor | None:
    if padding is None:
        return _visible(query, key) if causal and query.shape[-2] not in (1, key.shape[-2]) else None
    seen = padding[:, None, None, :].bool()
    return seen & _visible(query, key) if causal else seen.expand(-1, -1, query.shape[-2], -1)


def _visible(query: Tensor, key: Tensor) -> Tensor:
    """The full mask of a causal call without padding."""
    rows, columns = query.shape[-2], key.shape[-2]
    return torch.ones(1, 1, rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)


@torch.compiler.disable
def _padding_of(mask: Tensor, query: Tensor, key: Tensor, begins: bool, name: str) -> Tensor | None:
    """The padding [B, keys] that a full mask of a causal call that ``begins`` sequences comes to; DoflaError if it is
    another pattern. A compiled model without a cache gets full masks, as a graph cannot ask if sequences are packed."""
    seen = mask if mask.dtype == torch.bool else mask == 0
    if begins and mask.shape[2:] == (query.shape[-2], key.shape[-2]):
        padding = seen[:, 0, -1].expand(len(key), -1)
        if (seen == _visible(query, key) & padding[:, None, None]).all():
            return None if padding.all() else padding
    raise DoflaError(
        f"layer {name} got a {mask.ndim}-dimensional attention mask: it knows padding only, so "
        "pass a [batch, length] mask, and do not pack several sequences into one row"
    )


def is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """True if this call is causal, as transformers' own attention functions decide it."""
    given = kwargs.get("is_causal")
    return bool(given if given is not None else getattr(module, "is_causal", True))


def standard_scaling(module: nn.Module, query: Tensor, scaling: float | None) -> tuple[Tensor, float]:
    """Query and scaling such that the kernel is ``exp(scaling · q·k)`` with q and k both as projected.

    Some families (OPT) scale the query themselves and pass a scaling of 1. The product is the same, but positive
    random features want the scale shared by both sides, so it is moved back.
    """
    if scaling is None:
        return query, query.shape[-1] ** -0.5
    own = getattr(module, "scaling", None)
    if scaling == 1.0 and isinstance(own, float) and own != 1.0:
        return query / own, own
    return query, float(scaling)


for name, function in ((LINEAR, dofla_attention), (RECORDING, recording_attention)):
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, padding_mask)
