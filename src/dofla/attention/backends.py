"""Which form of the arithmetic does the work: all give the same results, and the fastest that can is taken."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dofla.attention import compiled, gpu
from dofla.attention.chunked import chunked
from dofla.attention.exact import exact_attention, merge
from dofla.attention.recurrent import recurrent
from dofla.attention.state import FeatureState, TokenBuffer, accumulable


class Features(Protocol):
    """What attention asks of a feature map. One that also has ``affine(scaling, dtype)``, giving the :class:`Affine`
    maps of queries and keys, is applied by the compiled kernels themselves."""

    features: int

    def log_query(self, x: Tensor, scaling: float) -> Tensor: ...

    def log_key(self, x: Tensor, scaling: float) -> Tensor: ...


def linear_attention(
    query: Tensor, tokens: TokenBuffer, features: Features, *, scaling: float, state: FeatureState
) -> tuple[Tensor, Tensor, FeatureState]:
    """Causal linear attention of queries [B, H, L, d] to as many new tokens and to the past.

    Returns:
        As :func:`dofla.attention.chunked`: output [B, H, L, dv], log-normaliser [B, H, L] and the state after.
    """
    given = tokens.value
    query, key, value = (accumulable(t) for t in (query, tokens.key, given))
    tokens = TokenBuffer(key, value, tokens.log_weight)
    if hasattr(features, "affine"):
        maps = features.affine(scaling, query.dtype)
        if compiled.usable(query, key, value, *(t for m in maps for t in (m.weight, m.bias))):
            return compiled.linear_attention(query, tokens, state, maps)
    a, b = features.log_query(query, scaling), features.log_key(key, scaling)
    if compiled.usable(a, b, value):
        return compiled.linear_attention(a, TokenBuffer(b, value, tokens.log_weight), state)
    b = b + tokens.log_weight[:, None, :, None]
    if gpu.usable(a, b, given, state.mean):
        return gpu.linear_attention(a, b, given, state=state)
    form = recurrent if a.shape[-2] == 1 else chunked
    return form(a, b, value, state=state)


def segment(numbers: int, query: Tensor) -> int:
    """How many tokens to do at once, if each has so many log-features of queries: on a CPU few enough to stay in its
    cache, on a GPU few enough to take little of its memory."""
    at_once = 2**20 if query.device.type == "cpu" else 2**26
    return max(at_once // numbers // 64 * 64, 128)


def add_exact_attention(
    seen: tuple[Tensor, Tensor],
    query: Tensor,
    near: TokenBuffer,
    window: int,
    sinks: TokenBuffer | None,
    visible_from: Tensor | None,
    scaling: float,
) -> Tensor:
    """Causal attention [B, H, L, dv] to what the features have ``seen`` (output and log-normaliser), to the window and
    to the sinks, under one normaliser. ``seen`` may be overwritten.

    Args:
        seen: output [B, H, L, dv] and log-normaliser [B, H, L].
        query: [B, H, L, d].
        near: L + window - 1 tokens; query i sees ``near[i : i + window]``.
        window: how many last keys a query sees, its own included.
        sinks: s tokens, or None.
        visible_from: [B, s], the first query that sees a sink.
        scaling: scores are ``scaling · q·k``.
    """
    if sinks is None:
        sinks = TokenBuffer.empty(near.key, near.value, 0)
        visible_from = near.log_weight.new_zeros(len(near.log_weight), 0, dtype=torch.int64)
    query, key, value = (accumulable(t) for t in (query, near.key, near.value))
    near = TokenBuffer(key, value, near.log_weight)
    if compiled.usable(query, key, value, *seen):
        sinks = TokenBuffer(accumulable(sinks.key), accumulable(sinks.value), sinks.log_weight)
        return compiled.add_exact_attention(seen, query, near, window, sinks, visible_from, scaling)
    hidden = torch.arange(query.shape[-2], device=query.device)[None, :, None] < visible_from.unsqueeze(1)
    return merge(seen, exact_attention(query, near, window - 1, 0, sinks, hidden, scaling))[0]
