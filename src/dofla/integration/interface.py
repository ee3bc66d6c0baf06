"""The attention functions that transformers calls, registered under dofla's names."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dofla.errors import DoflaError
from dofla.integration.cache import cache_of
from dofla.integration.instead import DOFLA, INSTEAD, RECORDING, computed_instead, computing, configs_of
from dofla.integration.masks import full_mask, padding_mask, padding_of, plain_mask, visible
from dofla.integration.padding import run_padded
from dofla.integration.prompt_reading import PromptReading
from dofla.integration.rollback import Read, Vectors
from dofla.layers import AttentionLayer

Visitor = Callable[..., None]
_token_by_token: ContextVar[bool] = ContextVar("dofla_token_by_token", default=False)
_wants_no_cache: ContextVar[bool | None] = ContextVar("dofla_wants_no_cache", default=None)  # None outside of calls
_visitor: ContextVar[tuple[Visitor | None, Callable] | None] = ContextVar("dofla_visitor", default=None)


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
    dofla_hidden: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of converted modules by their layers, of all others by softmax.

    ``dofla_entry`` is the entry of the cache that the layer reads and writes, or None; or the softmax cache of a prompt
    that is read twice, which does the rest. ``dofla_hidden`` [B, L, D] is what the module reads, if it is several
    tokens. Dropout of attention weights has no counterpart here, as no weight is ever formed, and is left out.
    """
    if name := computed_instead(module.config):
        run = ALL_ATTENTION_FUNCTIONS.get(name) or _eager_of(module)
        return run(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    if isinstance(dofla_entry, PromptReading):
        return dofla_entry.attend(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    layer = module._modules.get("dofla")  # as an attribute of a module it takes ten times as long to find
    if not isinstance(layer, AttentionLayer):
        return softmax_attention(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    attention_mask = plain_mask(attention_mask, module)
    causal = is_causal(module, kwargs)
    states = None if dofla_entry is None else dofla_entry.states
    if attention_mask is not None and attention_mask.ndim != 2:
        attention_mask = padding_of(attention_mask, query, key, causal and not states, layer.name)
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
        exact = not trained and _prefills_exactly(layer, query, dofla_entry)
        importance = _importance(layer, dofla_hidden, key) if exact else None
        vectors = asked, key, value, weight, importance
        out = run(layer, dofla_entry, vectors, scaling=own_scaling, causal=causal, exact=exact)
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


def _run(layer: AttentionLayer, entry: Any, vectors: Vectors, *, exact: bool, **options: Any) -> Tensor:
    """The layer's output; the states after go into the entry of the cache, if there is one."""
    if entry is None:
        return _read(layer, vectors, None, keeps_states=False, exact=exact, **options)[0]
    read: Read = partial(_read, layer, keeps_states=True, room=entry.room, **options)
    read = read if entry.history is None else partial(entry.history.read, read)
    out, entry.states = read(vectors, entry.states, exact=exact, in_place=entry.in_place)
    return out


def _read(
    layer: AttentionLayer,
    vectors: Vectors,
    states: Any,
    *,
    causal: bool,
    keeps_states: bool,
    in_place: bool = False,
    **options: Any,
) -> tuple[Tensor, Any]:
    """The layer's output, and the states after."""
    *tokens, weight, importance = vectors
    run = partial(layer, in_place=in_place, **options)
    if weight is None or not causal:
        return run(*tokens, weight=weight, states=states, causal=causal, importance=importance)
    options = {"keeps_states": keeps_states, "in_place": in_place, "join": layer.joined}
    return run_padded(run, vectors, states, **options)


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
    """True if the call is an exact prefill. Without a cache that someone wants it is none, so that a single pass over a
    text, as evaluation and training make it, gives what decoding the text would give."""
    if entry is None or query.shape[-2] == 1 or layer.prefill == "sequential":
        return False
    return not (one_by_one() or _wants_no_cache.get())


def begin_call(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a converted model, and of its body, which may be called alone: transformers makes a cache for
    every call, by default. Only who gives one, or says ``use_cache``, is going to decode."""
    if not torch.compiler.is_compiling() and _wants_no_cache.get() is None:
        _wants_no_cache.set(kwargs.get("use_cache") is None and cache_of(args, kwargs) is None)


def end_call(module: nn.Module, args: tuple, output: Any) -> None:
    """Forward hook of the same, of failed calls too: the next one says for itself what it wants."""
    if not torch.compiler.is_compiling():
        _wants_no_cache.set(None)


def _importance(layer: AttentionLayer, hidden: Tensor | None, key: Tensor) -> Tensor | None:
    """The importance [B, Hkv, L] by which the tokens with keys [B, Hkv, L, d] are retained, where it is predicted."""
    predictor, tokens = layer.predictor, key.shape[2]
    if predictor is None or hidden is None:
        return None
    fits = hidden.shape == (len(key), tokens, predictor.weight.shape[1] - 1)
    return layer.predicted(hidden) if fits else None


def one_by_one() -> bool:
    """True if several tokens are read one after the other, whatever a plan says: in compiled graphs too."""
    return torch.compiler.is_compiling() or _token_by_token.get()


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
    if computed_instead(module.config) not in (None, RECORDING):
        return dofla_attention(module, query, key, value, attention_mask, **kwargs)
    visit, run = _visitor.get() or (None, softmax_attention)
    attention_mask = plain_mask(attention_mask, module)
    if visit is not None:
        visit(module, query, key, value, attention_mask, kwargs.get("scaling"), kwargs)
    return run(module, query, key, value, attention_mask, **kwargs)


def unreachable(model: PreTrainedModel) -> str:
    """The error of a model whose attention is none of transformers' implementations."""
    return (
        f"{type(model).__name__} has no attention that goes through transformers' attention interface: "
        "models with their own attention code (BLOOM, Falcon, MPT, ...) cannot be converted"
    )


@contextmanager
def visiting(model: PreTrainedModel, visitor: Visitor | None, run: Callable | None = None) -> Iterator[None]:
    """Within the block, ``visitor`` sees every call of the model's attention, which goes on with ``run``; default
    softmax attention. By default a converted model goes on serving other threads meanwhile."""
    before, configs = model.config._attn_implementation, configs_of(model)
    if before == DOFLA and run is None:
        token = _visitor.set((visitor, softmax_attention))
        try:
            with computing(model, RECORDING):
                yield
        finally:
            _visitor.reset(token)
        return
    model.set_attn_implementation(RECORDING)
    others = INSTEAD.set({own: other for own, other in INSTEAD.get().items() if own not in configs})
    token = _visitor.set((visitor, run or softmax_attention))
    try:
        if model.config._attn_implementation != RECORDING:
            raise DoflaError(unreachable(model))
        yield
    finally:
        _visitor.reset(token)
        INSTEAD.reset(others)
        model.set_attn_implementation(before)


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
        attention_mask = full_mask(attention_mask, query, key, is_causal(module, kwargs))
    if kwargs.get("softcap") is None and kwargs.get("s_aux") is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if attention_mask is None:
        attention_mask = visible(query, key)
    if attention_mask.dtype == torch.bool:
        hidden = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, hidden)
    return _eager_of(module)(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)


def _eager_of(module: nn.Module) -> Callable:
    """The plain attention function of a module's family."""
    return sys.modules[type(module).__module__].eager_attention_forward


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


for name, function in ((DOFLA, dofla_attention), (RECORDING, recording_attention)):
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, padding_mask)
