"""Attention through features: features for the far past, exact scores for a window and sinks, one joint normalizer."""

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dofla.attention.backend import Backend, Features
from dofla.attention.backends import backend_for
from dofla.attention.call import Call
from dofla.attention.chunked import chunked
from dofla.attention.constants import LOG_ZERO
from dofla.attention.eight_bits import PackedTokens
from dofla.attention.exact import ExactPart, exact_attention, merge, sink_slots, take_sinks
from dofla.attention.state import FeatureState, Tensors, TokenBuffer, accumulable, known_full, masked

_Exact = TypeVar("_Exact", bound=TokenBuffer | PackedTokens, covariant=True)
"""Type of the local window and the attention sinks."""


@dataclass(frozen=True)
class HybridState(Tensors, Generic[_Exact]):
    """Everything that heads with features carry: the state of the features, if there are any, the last ``window``
    tokens and the first ``sinks`` ones.

    The window is a delay line in front of the feature state: a key enters ``features`` when it leaves ``window``,
    unless it is one of the first real keys, which go to ``sinks`` instead. Window and sinks are kept as
    :class:`dofla.attention.PackedTokens` from one call to the next where the layer keeps them in int8.
    """

    features: FeatureState | None
    window: _Exact | None = None
    sinks: _Exact | None = None


def attend(
    call: Call, features: Features, state: HybridState[TokenBuffer] | None = None, *, window: int = 0, sinks: int = 0
) -> tuple[Tensor, HybridState[TokenBuffer] | None]:
    """Linear attention of new tokens to themselves and to the past held in ``state``.

    Args:
        call: the new tokens; the kernel to be approximated is ``exp(scaling · q·k)``. A call that is not causal lets
            every query see every key; it has no past and leaves no state.
        features: the feature map.
        state: the past, or None at the beginning of a sequence.
        window: the last ``window`` keys, the query's own included, have exact scores.
        sinks: so do the first ``sinks`` real keys.

    Returns:
        Output [B, H, L, dv] in the dtype of the values, and the state after the last token (None unless causal).
    """
    if not call.causal:
        return _attend_both_ways(call, features, window, sinks).to(call.value.dtype), None
    backend = backend_for(call.vectors, () if call.log_weight is None else (call.log_weight,))
    length, pieces = call.query.shape[-2], []
    size = _segment(call.query.shape[0] * call.query.shape[1] * features.features, call.query)
    for start in range(0, length, size):
        part = slice(start, start + size)
        # Later segments find their window in front of them; the first, and padded ones, in the state.
        before = window if call.log_weight is None and start >= window else 0
        longer = slice(start - before, start + size)
        log_weight = None if call.log_weight is None else call.log_weight[:, longer]
        line = masked(call.key[:, :, longer], call.value[:, :, longer], log_weight)
        if state is None:
            state = HybridState(
                _empty_features(line, features.features) if features.features else None,
                TokenBuffer.empty(line.key, line.value, window) if window else None,
                TokenBuffer.empty(line.key, line.value, sinks) if sinks else None,
            )
        if state.window is not None and before < window:
            line = state.window.then(line)
        piece, state = _attend_causally(
            call.query[:, :, part], line, features, call.scaling, state, window, sinks, backend
        )
        pieces.append(piece.to(call.value.dtype))
    if state is not None and state.window is not None and length > 1:
        state = replace(state, window=state.window.copy())  # a view would keep all tokens of the call in memory
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -2), state


def packed(
    after: HybridState[TokenBuffer], before: HybridState[TokenBuffer | PackedTokens] | None, new: int
) -> HybridState[PackedTokens]:
    """The state ``after`` ``new`` tokens for keeping: what ``before`` held in int8 is not packed again."""
    held, first = (None, None) if before is None else (before.window, before.sinks)
    window, sinks = None, None
    if after.window is not None:
        if isinstance(held, PackedTokens) and new < len(after.window):
            window = held.shifted(PackedTokens.of(after.window[-new:]))
        else:
            window = PackedTokens.of(after.window)
    if after.sinks is not None:
        if isinstance(first, PackedTokens) and known_full(first.log_weight):
            sinks = first
        else:
            sinks = PackedTokens.of(after.sinks)
    return HybridState(after.features, window, sinks)


def unpacked(state: HybridState[TokenBuffer | PackedTokens], dtype: torch.dtype) -> HybridState[TokenBuffer]:
    """The state for arithmetic in ``dtype``, in which exact tokens that are not packed are already."""
    window, sinks = (t.unpacked(dtype) if isinstance(t, PackedTokens) else t for t in (state.window, state.sinks))
    return HybridState(state.features, window, sinks)


def _segment(numbers: int, query: Tensor) -> int:
    """Number of tokens to do at once, if each has so many log-features of queries: on a CPU few enough to stay in its
    cache, on a GPU few enough to take little of its memory."""
    at_once = 2**20 if query.device.type == "cpu" else 2**26
    return max(at_once // max(numbers, 1) // 64 * 64, 128)


def _attend_causally(
    query: Tensor,
    line: TokenBuffer,
    features: Features,
    scaling: float,
    state: HybridState[TokenBuffer],
    window: int,
    sinks: int,
    backend: Backend,
) -> tuple[Tensor, HybridState[TokenBuffer]]:
    """One segment; ``line`` is the window before it followed by its tokens."""
    length, kept, buffer, exact = query.shape[-2], line, None, None
    if window or sinks:
        held = TokenBuffer.empty(line.key, line.value, 0) if state.sinks is None else state.sinks
        kept, buffer, visible_from = take_sinks(held, line[:length])
        exact = ExactPart(query, line[1:], window, buffer, visible_from, scaling).widened()
    after = None
    if state.features is not None:
        out, after = backend.through_features(query, kept, features, scaling, state.features, exact)
    elif exact is not None:
        out = exact.attend()[0]
    else:
        out = query.new_zeros(*query.shape[:-1], line.value.shape[-1])
    return out, HybridState(after, line[length:] if window else None, buffer if sinks else None)


def _empty_features(tokens: TokenBuffer, features: int) -> FeatureState:
    batch, kv_heads, _, value_dim = tokens.value.shape
    dtype = torch.float64 if tokens.value.dtype == torch.float64 else torch.float32
    return FeatureState.empty(batch, kv_heads, features, value_dim, dtype=dtype, device=tokens.value.device)


def _attend_both_ways(call: Call, features: Features, window: int, sinks: int) -> Tensor:
    query, scaling, tokens = call.query, call.scaling, masked(call.key, call.value, call.log_weight)
    none_yet = TokenBuffer.empty(tokens.key, tokens.value, sinks)
    kept, sink_buffer, _ = take_sinks(none_yet, tokens)
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
    hidden = _sinks_inside_window(sink_slots(tokens, none_yet), sinks, window)
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
    is_slot = rank.unsqueeze(-1) == torch.arange(sinks, device=rank.device)  # [B, L, s]
    sink_position = (is_slot * position[None, :, None]).sum(dim=1)  # [B, s]
    return (position[None, :, None] - sink_position.unsqueeze(1)).abs() < window
