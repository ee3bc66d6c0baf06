"""The one entrance: features for the far past, exact scores for a window and sinks, one joint normaliser."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dofla.attention.chunked import chunked
from dofla.attention.exact import exact_attention
from dofla.attention.recurrent import recurrent
from dofla.attention.state import LOG_ZERO, FeatureState, State, TokenBuffer, accumulable


class Features(Protocol):
    """What :func:`attend` asks of a feature map."""

    features: int

    def log_query(self, x: Tensor, scaling: float) -> Tensor: ...

    def log_key(self, x: Tensor, scaling: float) -> Tensor: ...


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: Features,
    *,
    scaling: float,
    weight: Tensor | None = None,
    state: State | None = None,
    window: int = 0,
    sinks: int = 0,
    causal: bool = True,
) -> tuple[Tensor, State | None]:
    """Linear attention of new tokens to themselves and to the past held in ``state``.

    Args:
        query: [B, H, L, d].
        key: [B, Hkv, L, d].
        value: [B, Hkv, L, dv].
        features: the feature map, for Hkv heads.
        scaling: the kernel to be approximated is ``exp(scaling · q·k)``.
        weight: key weights [B, L], 0 for padding; default all ones.
        state: the past, or None at the beginning of a sequence.
        window: the last ``window`` keys, the query's own included, have exact scores.
        sinks: so do the first ``sinks`` real keys.
        causal: False lets every query see every key; such a call has no past and leaves no state.

    Returns:
        Output [B, H, L, dv] in the dtype of ``value``, and the state after the last token (None unless causal).
    """
    tokens = _mask_padding(key, value, weight)
    if not causal:
        out = _attend_both_ways(query, tokens, features, scaling, window, sinks)
        return out.to(value.dtype), None
    if state is None:
        state = empty_state(tokens, features.features, window, sinks)

    length = query.shape[-2]
    line = state.window.then(tokens) if window else tokens
    leaving = line[:length]
    rank = _rank_of_leaving(leaving, state.sinks)
    is_sink = rank < sinks
    form = recurrent if length == 1 else chunked
    seen = form(
        features.log_query(query, scaling),
        _log_keys(features, leaving, is_sink, scaling),
        accumulable(leaving.value),
        state=state.features,
    )
    sink_buffer, sink_hidden = _fill_sinks(state.sinks, leaving, rank, is_sink)
    if window or sinks:
        exact = exact_attention(query, line[1:], window - 1, 0, sink_buffer, sink_hidden, scaling)
        out, _ = _merge(seen[:2], exact)
    else:
        out = seen[0]
    return out.to(value.dtype), State(seen[2], line[length:] if window else None, sink_buffer)


def empty_state(tokens: TokenBuffer, features: int, window: int, sinks: int) -> State:
    """The state before the first token, shaped for tokens like these."""
    batch, kv_heads, _, value_dim = tokens.value.shape
    dtype = torch.float64 if tokens.value.dtype == torch.float64 else torch.float32
    return State(
        FeatureState.empty(batch, kv_heads, features, value_dim, dtype=dtype, device=tokens.value.device),
        TokenBuffer.empty(tokens.key, tokens.value, window) if window else None,
        TokenBuffer.empty(tokens.key, tokens.value, sinks) if sinks else None,
    )


def _mask_padding(key: Tensor, value: Tensor, weight: Tensor | None) -> TokenBuffer:
    batch, length = key.shape[0], key.shape[-2]
    if weight is None:
        return TokenBuffer(key, value, torch.zeros(batch, length, device=key.device))
    real = weight > 0
    log_weight = torch.where(real, weight.float().clamp_min(torch.finfo(torch.float32).tiny).log(), LOG_ZERO)
    hidden = ~real[:, None, :, None]
    return TokenBuffer(key.masked_fill(hidden, 0), value.masked_fill(hidden, 0), log_weight)


def _log_keys(features: Features, tokens: TokenBuffer, is_sink: Tensor, scaling: float) -> Tensor:
    log_weight = tokens.log_weight.masked_fill(is_sink, LOG_ZERO)
    return features.log_key(tokens.key, scaling) + log_weight[:, None, :, None]


def _rank_of_leaving(leaving: TokenBuffer, held: TokenBuffer | None) -> Tensor:
    """How many real keys came before each leaving one [B, L], as far as it matters for sinks."""
    real = leaving.log_weight > LOG_ZERO
    already = (held.log_weight > LOG_ZERO).sum(-1, keepdim=True) if held is not None else 0
    never = torch.iinfo(torch.int64).max
    return torch.where(real, already + real.cumsum(-1) - 1, never)


def _fill_sinks(
    held: TokenBuffer | None, leaving: TokenBuffer, rank: Tensor, is_sink: Tensor
) -> tuple[TokenBuffer | None, Tensor | None]:
    """The sinks after this call, and which query does not see which of them [B, L, s]: a query sees a sink once it
    has left the window, before that it sees the same token there."""
    if held is None:
        return None, None
    places = torch.arange(len(held), device=rank.device)
    arrives = is_sink.unsqueeze(-1) & (rank.unsqueeze(-1) == places)  # [B, L, s]
    taken = arrives.any(dim=1)
    moved = arrives.to(leaving.key.dtype).mT.unsqueeze(1)  # [B, 1, s, L]
    free = taken[:, None, :, None]
    source = arrives.to(torch.int64).argmax(dim=1)
    sinks = TokenBuffer(
        torch.where(free, moved @ leaving.key, held.key),
        torch.where(free, moved.to(leaving.value.dtype) @ leaving.value, held.value),
        torch.where(taken, leaving.log_weight.gather(1, source), held.log_weight),
    )
    visible_from = torch.where(taken, source, 0)
    return sinks, torch.arange(rank.shape[1], device=rank.device)[None, :, None] < visible_from.unsqueeze(1)


def _merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two attentions over disjoint sets of keys, each with its log-normaliser, made one."""
    share = torch.sigmoid(first[1] - second[1]).unsqueeze(-1)
    return share * first[0] + (1 - share) * second[0], torch.logaddexp(first[1], second[1])


def _attend_both_ways(
    query: Tensor, tokens: TokenBuffer, features: Features, scaling: float, window: int, sinks: int
) -> Tensor:
    rank = _rank_of_leaving(tokens, None)
    is_sink = rank < sinks
    a = features.log_query(query, scaling)
    b = _log_keys(features, tokens, is_sink, scaling)
    value = accumulable(tokens.value)
    empty = empty_state(tokens, features.features, window, sinks)
    if window == 0:
        seen = chunked(a, b, value, state=empty.features, causal=False)[:2]
    else:
        past = chunked(a, *_delay(b, value, window), state=empty.features)
        future = chunked(a.flip(-2), *_delay(b.flip(-2), value.flip(-2), window), state=empty.features)
        seen = _merge(past[:2], (future[0].flip(-2), future[1].flip(-1)))
    if not (window or sinks):
        return seen[0]
    sink_buffer, _ = _fill_sinks(empty.sinks, tokens, rank, is_sink)
    margin = max(window - 1, 0)
    beside = TokenBuffer.empty(tokens.key, tokens.value, margin)
    near, after = (beside.then(tokens).then(beside), margin) if window else (tokens[1:], 0)
    hidden = _sinks_inside_window(rank, sinks, window) if sinks else None
    return _merge(seen, exact_attention(query, near, window - 1, after, sink_buffer, hidden, scaling))[0]


def _delay(b: Tensor, value: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    length = b.shape[-2]
    b = F.pad(b, (0, 0, steps, 0), value=LOG_ZERO)[:, :, :length]
    return b, F.pad(value, (0, 0, steps, 0))[:, :, :length]


def _sinks_inside_window(rank: Tensor, sinks: int, window: int) -> Tensor:
    """[B, L, s], True where a sink stands closer than ``window`` to the query, which then sees it in the band."""
    position = torch.arange(rank.shape[1], device=rank.device)
    is_place = rank.unsqueeze(-1) == torch.arange(sinks, device=rank.device)  # [B, L, s]
    sink_position = (is_place * position[None, :, None]).sum(dim=1)  # [B, s]
    return (position[None, :, None] - sink_position.unsqueeze(1)).abs() < window
