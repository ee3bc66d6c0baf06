"""A memory that fades, from one call to the next as it is kept: window and sinks in eight bits, stages in codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dofla.attention import compiled
from dofla.attention.attend import _of_queries, _select, _tokens, _write, empty_state
from dofla.attention.backends import Features, causal_attention, segment
from dofla.attention.coding import Fading
from dofla.attention.compiled.fading import DTYPES, attend_and_code
from dofla.attention.eight_bits import packed
from dofla.attention.state import FeatureState, State, TokenBuffer


def attend_faded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: Features,
    fading: Fading,
    *,
    scaling: float,
    weight: Tensor | None,
    state: State | None,
    window: int,
    sinks: int,
    heads: Sequence[int] | None,
    out: Tensor | None,
) -> tuple[Tensor, State] | None:
    """What :func:`dofla.attention.attend` makes of tokens that are kept in eight bits, by the compiled kernels.

    Args and returns are those of :func:`dofla.attention.attend`, but that ``state`` is as it is kept
    (:func:`dofla.attention.packed`), before and after. None if the kernels do not do such a call.
    """
    others = () if weight is None else (weight,)
    if window == 0 or query.shape[-2] == 0 or not compiled.usable((query, key, value), others, DTYPES):
        return None
    if state is None:
        state = _empty(key, value, features, fading, window, sinks, heads)
    log_weight = None if weight is None else _tokens(key[..., :0], value[..., :0], weight).log_weight
    behind = features.features > 0
    piece, normaliser, left, after = attend_and_code(
        query, key, value, log_weight, state, fading, scaling, heads, behind
    )
    query_heads = _of_queries(heads, query.shape[1] // key.shape[1])
    if behind:
        queries = _select(query, query_heads)
        piece, far = _through_features(queries, left, features, scaling, state.features, (piece, normaliser))
        piece, after = piece.to(value.dtype), replace(after, features=far)
    return _write(piece, out, query_heads), after


def _empty(
    key: Tensor,
    value: Tensor,
    features: Features,
    fading: Fading,
    window: int,
    sinks: int,
    heads: Sequence[int] | None,
) -> State:
    """The state before the first token, as it is kept."""
    tokens = _tokens(_select(key, heads), _select(value, heads), None)
    state = empty_state(tokens, features.features, window, sinks)
    return replace(packed(state, None, 0), stages=fading.empty(len(key), key.device))


def _through_features(
    query: Tensor,
    tokens: TokenBuffer,
    features: Features,
    scaling: float,
    state: FeatureState,
    near: tuple[Tensor, Tensor],
) -> tuple[Tensor, FeatureState]:
    """Output [B, H, L, dv] of features behind what is ``near``, some tokens at a time; and the state after."""
    length, pieces = query.shape[-2], []
    size = segment(query.shape[0] * query.shape[1] * features.features, query)
    for start in range(0, length, size):
        part = slice(start, start + size)
        piece, state = causal_attention(
            query[:, :, part],
            tokens[part],
            features,
            scaling=scaling,
            state=state,
            near=(near[0][:, :, part], near[1][:, :, part]),
        )
        pieces.append(piece)
    return torch.cat(pieces, 2), state
