"""Compressed caches of a layer, as they are kept from one call to the next: packed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dofla.attention.backend import Backend, Features
from dofla.attention.features import causal_attention, segment
from dofla.attention.flat import FlatState, Layout
from dofla.attention.heads import query_heads, select, write
from dofla.attention.state import FeatureState, TokenBuffer, weighted


class CompressedHeads:
    """The groups of a layer's heads whose caches are packed: one call of the kernels for all of them.

    Args:
        layouts: of each group, with a window; they say what is where in a state.
        features: the feature map of each group, of which those are used that have features.
    """

    def __init__(self, layouts: Sequence[Layout], features: Sequence[Features]) -> None:
        self.layouts, self.features = layouts, features

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        weight: Tensor | None,
        states: Sequence[FlatState | None],
        backend: Backend,
        in_place: bool,
    ) -> tuple[Tensor, list[FlatState]] | None:
        """Attention of new tokens, as :func:`dofla.attention.attend`, with a packed state for each group before and
        after.

        With ``in_place``, the states before may be overwritten. Output rows [B, H, L, dv] of heads in no group are
        zeros. None if the backend has no kernels for such a call.
        """
        before = [
            layout.empty(len(query), query.device) if state is None else state
            for state, layout in zip(states, self.layouts, strict=True)
        ]
        log_weight = None if weight is None else weighted(key[..., :0], value[..., :0], weight).log_weight
        tokens = [state.tokens for state in before]
        found = backend.read_packed(self.layouts, query, key, value, log_weight, tokens, scaling, in_place)
        if found is None:
            return None
        out, states_after, behind = found
        if not behind:
            return out, [FlatState(None, tokens) for tokens in states_after]
        far, groups = [state.features for state in before], query.shape[1] // key.shape[1]
        with_features = [n for n, layout in enumerate(self.layouts) if layout.features]
        for n, (normalizer, left) in zip(with_features, behind, strict=True):
            heads = query_heads(self.layouts[n].heads, groups)
            near, own = (select(out, heads), normalizer), select(query, heads)
            piece, far[n] = _through_features(own, left, self.features[n], scaling, far[n], near, backend)
            write(piece, out, heads)
        return out.to(value.dtype), [FlatState(*parts) for parts in zip(far, states_after, strict=True)]


def _through_features(
    query: Tensor,
    tokens: TokenBuffer,
    features: Features,
    scaling: float,
    state: FeatureState | None,
    near: tuple[Tensor, Tensor],
    backend: Backend,
) -> tuple[Tensor, FeatureState | None]:
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
            backend=backend,
            near=(near[0][:, :, part], near[1][:, :, part]),
        )
        pieces.append(piece)
    return torch.cat(pieces, 2), state
