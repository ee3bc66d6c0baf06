"""A memory that fades, from one call to the next as it is kept: in one piece."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dofla.attention import compiled
from dofla.attention.attend import _of_queries, _select, _tokens, _write
from dofla.attention.backends import Features, causal_attention, segment
from dofla.attention.coding import Fading
from dofla.attention.compiled.fading import DTYPES, attend_and_code
from dofla.attention.flat import FlatState, Layout
from dofla.attention.state import FeatureState, TokenBuffer


def attend_faded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: Features,
    fading: Fading,
    layout: Layout,
    *,
    scaling: float,
    weight: Tensor | None,
    state: FlatState | None,
    heads: Sequence[int] | None,
    out: Tensor | None,
) -> tuple[Tensor, FlatState] | None:
    """What :func:`dofla.attention.attend` makes of tokens that are kept in eight bits, by the compiled kernels.

    Args and returns are those of :func:`dofla.attention.attend`, but that ``state`` is in one piece, before and after,
    and ``layout`` says what is where in it. None if the kernels do not do such a call.
    """
    others = () if weight is None else (weight,)
    if layout.window == 0 or query.shape[-2] == 0 or not compiled.usable((query, key, value), others, DTYPES):
        return None
    if state is None:
        state = layout.flat(layout.empty(fading, len(query), query.device))
    log_weight = None if weight is None else _tokens(key[..., :0], value[..., :0], weight).log_weight
    piece, tokens, *behind = attend_and_code(
        query, key, value, log_weight, state.tokens, fading, layout, scaling, heads
    )
    query_heads, far = _of_queries(heads, query.shape[1] // key.shape[1]), state.features
    if behind:
        normaliser, *left = behind
        queries = _select(query, query_heads)
        piece, far = _through_features(queries, TokenBuffer(*left), features, scaling, far, (piece, normaliser))
        piece = piece.to(value.dtype)
    return _write(piece, out, query_heads), FlatState(far, tokens)


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
