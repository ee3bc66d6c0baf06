"""The one entrance: features for the far past, exact scores for a window and sinks, one joint normalizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dofla.attention.backend import Backend, Features
from dofla.attention.backends import backend_for
from dofla.attention.carried import State
from dofla.attention.chunked import chunked
from dofla.attention.coding import CodedTiers, CodedTokens, ScoredTokens
from dofla.attention.constants import LOG_ZERO
from dofla.attention.exact import ExactPart, exact_attention, merge
from dofla.attention.features import causal_attention, segment
from dofla.attention.heads import query_heads, select, write
from dofla.attention.state import FeatureState, TokenBuffer, accumulable, known_full, weighted


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: Features,
    *,
    scaling: float,
    weight: Tensor | None = None,
    state: State[TokenBuffer] | None = None,
    window: int = 0,
    sinks: int = 0,
    coded_tiers: CodedTiers | None = None,
    causal: bool = True,
    heads: Sequence[int] | None = None,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, State[TokenBuffer] | None]:
    """Linear attention of new tokens to themselves and to the past held in ``state``.

    Args:
        query: [B, H, L, d].
        key: [B, Hkv, L, d].
        value: [B, Hkv, L, dv].
        features: the feature map, for Hkv heads (or for as many as ``heads`` names).
        scaling: the kernel to be approximated is ``exp(scaling · q·k)``.
        weight: key weights [B, L], 0 for padding; default all ones.
        state: the past, or None at the beginning of a sequence.
        window: the last ``window`` keys, the query's own included, have exact scores.
        sinks: so do the first ``sinks`` real keys.
        coded_tiers: tiers of tokens in few bits between the window and the features; causal calls only.
        causal: False lets every query see every key; such a call has no past and leaves no state.
        heads: do only these KV heads and their queries, as ragged layers do, group by group.
        out: [B, H, L, dv], where to write the rows of those heads; needed if ``heads`` is given.
        backend: default the one of the table that takes these.

    Returns:
        Output [B, H, L, dv] in the dtype of ``value``, and the state after the last token (None unless causal).
    """
    own_heads = query_heads(heads, query.shape[1] // key.shape[1])
    if not causal:
        tokens = weighted(select(key, heads), select(value, heads), weight)
        result = _attend_both_ways(select(query, own_heads), tokens, features, scaling, window, sinks)
        return write(result.to(value.dtype), out, own_heads), None
    backend = backend or backend_for((query, key, value), () if weight is None else (weight,))
    length = query.shape[-2]
    count = query.shape[1] if own_heads is None else len(own_heads)
    size = segment(query.shape[0] * count * features.features, query)
    if out is None and length > size:
        out = value.new_empty(*query.shape[:-1], value.shape[-1])
    for start in range(0, length, size):
        part = slice(start, start + size)
        # Later segments find their window in front of them; the first, and padded ones, in the state.
        before = window if weight is None and start >= window else 0
        longer = slice(start - before, start + size)
        line = weighted(select(key, heads, longer), select(value, heads, longer), _part(weight, longer))
        if state is None:
            state = empty_state(line, features.features, window, sinks)
        if state.window is not None and before < window:
            line = state.window.then(line)
        queries = select(query, own_heads, part)
        piece, state = _attend_causally(queries, line, features, scaling, state, window, sinks, coded_tiers, backend)
        result = write(piece.to(value.dtype), out, own_heads, part)
    if state is not None and state.window is not None and length > 1:
        state = replace(state, window=state.window.copy())  # a view would keep all tokens of the call in memory
    return result, state


def _part(weight: Tensor | None, part: slice) -> Tensor | None:
    return None if weight is None else weight[:, part]


def _attend_causally(
    query: Tensor,
    line: TokenBuffer,
    features: Features,
    scaling: float,
    state: State[TokenBuffer],
    window: int,
    sinks: int,
    coded_tiers: CodedTiers | None,
    backend: Backend,
) -> tuple[Tensor, State[TokenBuffer]]:
    """One segment; ``line`` is the window before it followed by its tokens."""
    if not (window or sinks or coded_tiers):
        out, after = causal_attention(query, line, features, scaling=scaling, state=state.features, backend=backend)
        return out, State(after)
    length = query.shape[-2]
    leaving = line[:length]
    held = TokenBuffer.empty(line.key, line.value, 0) if state.sinks is None else state.sinks
    kept, buffer, visible_from = _take_sinks(held, leaving)
    exact = ExactPart(query, line[1:], window, buffer, visible_from, scaling)
    near: tuple[Tensor, Tensor] | None = None
    tiers: tuple[CodedTokens | ScoredTokens, ...] = ()
    if coded_tiers:
        real = line.log_weight[:, -length:] > LOG_ZERO
        behind = features.features > 0
        near, tiers, left = coded_tiers.attend(
            query, kept, state.tiers, scaling, real, behind=behind, operations=backend
        )
        kept = kept if left is None else left
    out, after = causal_attention(
        query, kept, features, scaling=scaling, state=state.features, backend=backend, exact=exact, near=near
    )
    return out, State(after, line[length:] if window else None, buffer if sinks else None, tiers)


def empty_state(tokens: TokenBuffer, features: int, window: int, sinks: int) -> State[TokenBuffer]:
    """The state before the first token, shaped for tokens like these."""
    return State(
        _empty_features(tokens, features) if features else None,
        TokenBuffer.empty(tokens.key, tokens.value, window) if window else None,
        TokenBuffer.empty(tokens.key, tokens.value, sinks) if sinks else None,
    )


def _empty_features(tokens: TokenBuffer, features: int) -> FeatureState:
    batch, kv_heads, _, value_dim = tokens.value.shape
    dtype = torch.float64 if tokens.value.dtype == torch.float64 else torch.float32
    return FeatureState.empty(batch, kv_heads, features, value_dim, dtype=dtype, device=tokens.value.device)


def _rank_of_leaving(leaving: TokenBuffer, held: TokenBuffer) -> Tensor:
    """The index of the sink slot that each token leaving the window would fill [B, L]: the number of real tokens before
    it, held sinks included. It is the largest integer for padding."""
    real = leaving.log_weight > LOG_ZERO
    already = (held.log_weight > LOG_ZERO).sum(-1, keepdim=True)
    never = torch.iinfo(torch.int64).max
    return torch.where(real, already + real.cumsum(-1) - 1, never)


def _take_sinks(held: TokenBuffer, leaving: TokenBuffer) -> tuple[TokenBuffer, TokenBuffer, Tensor]:
    """Move the first real tokens that leave the window into the free sink slots.

    Returns:
        The tokens with those masked; the sinks after this call; and the first query that sees each of them as a sink
        [B, s]. Earlier queries see it in the window.
    """
    if not len(held) or known_full(held.log_weight):
        return leaving, held, torch.zeros_like(held.log_weight, dtype=torch.int64)
    rank = _rank_of_leaving(leaving, held)
    is_sink = rank < len(held)
    kept = TokenBuffer(leaving.key, leaving.value, leaving.log_weight.masked_fill(is_sink, LOG_ZERO))
    return kept, *_fill_sinks(held, leaving, rank, is_sink)


def _fill_sinks(held: TokenBuffer, leaving: TokenBuffer, rank: Tensor, is_sink: Tensor) -> tuple[TokenBuffer, Tensor]:
    places = torch.arange(len(held), device=rank.device)
    arrives = is_sink.unsqueeze(-1) & (rank.unsqueeze(-1) == places)  # [B, L, s]
    taken, source = arrives.any(dim=1), arrives.to(torch.int64).argmax(dim=1)
    free, place = taken[:, None, :, None], source[:, None, :, None]
    sinks = TokenBuffer(
        torch.where(free, leaving.key.take_along_dim(place, dim=2).to(held.key.dtype), held.key),
        torch.where(free, leaving.value.take_along_dim(place, dim=2).to(held.value.dtype), held.value),
        torch.where(taken, leaving.log_weight.gather(1, source), held.log_weight),
    )
    return sinks, torch.where(taken, source, 0)


def _attend_both_ways(
    query: Tensor, tokens: TokenBuffer, features: Features, scaling: float, window: int, sinks: int
) -> Tensor:
    none_yet = TokenBuffer.empty(tokens.key, tokens.value, sinks)
    kept, sink_buffer, _ = _take_sinks(none_yet, tokens)
    if features.features:
        seen = _far_both_ways(query, kept, features, scaling, window)
    else:
        nothing = accumulable(query).new_zeros(*query.shape[:-1], tokens.value.shape[-1])
        seen = nothing, torch.full_like(nothing[..., 0], LOG_ZERO)
    if not (window or sinks):
        return seen[0]
    margin = max(window - 1, 0)
    beside = TokenBuffer.empty(tokens.key, tokens.value, margin)
    near, after = (beside.then(tokens).then(beside), margin) if window else (tokens[1:], 0)
    hidden = _sinks_inside_window(_rank_of_leaving(tokens, none_yet), sinks, window)
    return merge(seen, exact_attention(query, near, window - 1, after, sink_buffer, hidden, scaling))[0]


def _far_both_ways(
    query: Tensor, tokens: TokenBuffer, features: Features, scaling: float, window: int
) -> tuple[Tensor, Tensor]:
    """Output and log-normalizer of the features of all keys ``window`` or more away."""
    a = features.log_query(query, scaling)
    b = features.log_key(tokens.key, scaling) + tokens.log_weight[:, None, :, None]
    value = accumulable(tokens.value)
    empty = _empty_features(tokens, features.features)
    if window == 0:
        return chunked(a, b, value, state=empty, causal=False)[:2]
    past = chunked(a, *_delay(b, value, window), state=empty)
    future = chunked(a.flip(-2), *_delay(b.flip(-2), value.flip(-2), window), state=empty)
    return merge(past[:2], (future[0].flip(-2), future[1].flip(-1)))


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
