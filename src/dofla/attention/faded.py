"""A memory that fades, from one call to the next as it is kept: in one piece."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dofla.attention import compiled
from dofla.attention.attend import _of_queries, _select, _tokens, _write
from dofla.attention.backends import Features, causal_attention, segment
from dofla.attention.compiled.fading import DTYPES, attend_and_code
from dofla.attention.flat import FlatState, Layout
from dofla.attention.state import FeatureState, TokenBuffer


def attend_faded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: Sequence[Features | None],
    layouts: Sequence[Layout],
    *,
    scaling: float,
    weight: Tensor | None,
    states: Sequence[FlatState | None],
) -> tuple[Tensor, list[FlatState]] | None:
    """What :func:`dofla.attention.attend` makes of tokens that are kept in eight bits, by the compiled kernels, for
    several groups of heads at once.

    Args and returns are those of :func:`dofla.attention.attend`, but that there is one of each for every group (no
    feature map where there are no features), that states are in one piece, before and after, and ``layouts``, with
    windows, say what is where in them. Output rows [B, H, L, dv] of heads in no group are zeros. None if the kernels do
    not do such a call.
    """
    others = () if weight is None else (weight,)
    if query.shape[-2] == 0 or not compiled.usable((query, key, value), others, DTYPES):
        return None
    before = [
        layout.flat(layout.empty(len(query), query.device)) if state is None else state
        for state, layout in zip(states, layouts, strict=True)
    ]
    log_weight = None if weight is None else _tokens(key[..., :0], value[..., :0], weight).log_weight
    held = [state.tokens for state in before]
    out, tokens, behind = attend_and_code(query, key, value, log_weight, held, layouts, scaling)
    far, found = [state.features for state in before], iter(behind)
    for n, layout in enumerate(layouts):
        if layout.features:
            heads, (normaliser, *left) = _of_queries(layout.heads, query.shape[1] // key.shape[1]), next(found)
            near = _select(out, heads), normaliser
            line = TokenBuffer(*left)
            piece, far[n] = _through_features(_select(query, heads), line, features[n], scaling, far[n], near)
            _write(piece, out, heads)
    if out.dtype != value.dtype:  # where features are behind
        out = out.to(value.dtype)
    return out, [FlatState(*parts) for parts in zip(far, tokens, strict=True)]


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
