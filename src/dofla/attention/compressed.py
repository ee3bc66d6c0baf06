"""A compressed cache, from one call to the next as it is kept: in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dofla.attention import compiled, gpu
from dofla.attention.attend import _of_queries, _select, _tokens, _write
from dofla.attention.backends import Features, causal_attention, segment
from dofla.attention.coding.heavy_hitters import weight_steps
from dofla.attention.coding.levels import TABLES
from dofla.attention.compiled.tiers import DTYPES, attend_and_code
from dofla.attention.flat import FlatState, Layout
from dofla.attention.state import FeatureState, TokenBuffer

if TYPE_CHECKING:
    from dofla.attention.gpu.token import Decoder


class CompressedHeads:
    """The groups of a layer's heads that are kept in one piece: one call of the compiled kernels for all of them.

    What does not change from token to token is looked up here once, since a decoded token is little else.

    Args:
        layouts: of each group, with a window; they say what is where in a state.
        features: the feature map of each group, of which those are used that have features.
    """

    def __init__(self, layouts: Sequence[Layout], features: Sequence[Features]) -> None:
        self.layouts, self.features = layouts, features
        self._keys = [layout.coded_tiers.key for layout in layouts]
        self._values = [layout.coded_tiers.value for layout in layouts]
        self._sizes = [number for layout in layouts for number in layout.sizes]
        self._behind = any(layout.features for layout in layouts)
        self._decoders: list[Decoder] | None = None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        weight: Tensor | None,
        states: Sequence[FlatState | None],
    ) -> tuple[Tensor, list[FlatState]] | None:
        """Compute :func:`dofla.attention.attend` with kernels, on window and sinks in int8 and tiers in codes.

        Args and returns are those of :func:`dofla.attention.attend`, but with a flat state for each group, before and
        after. Output rows [B, H, L, dv] of heads in no group are zeros. None if the kernels do not support the call.
        """
        if query.shape[-2] == 1 and gpu.usable(query, key, value):
            return self._decode_on_gpu(query, key, value, scaling, weight, states)
        if query.shape[-2] == 0 or not compiled.usable(
            (query, key, value), () if weight is None else (weight,), DTYPES
        ):
            return None
        before, log_weight = self._begun(states, query), _log_weight(key, value, weight)
        out, *found = attend_and_code(
            query,
            key,
            value,
            log_weight,
            [state.tokens for state in before],
            [coder._buffers["constants"] for coder in self._keys],  # as an attribute it takes ten times as long to find
            [coder._buffers["constants"] for coder in self._values],
            TABLES,
            self._sizes,
            scaling,
        )
        if not self._behind:
            return out, [FlatState(None, tokens) for tokens in found]
        far, behind = [state.features for state in before], iter(found[len(before) :])
        for n, layout in enumerate(self.layouts):
            if layout.features:
                heads = _of_queries(layout.heads, query.shape[1] // key.shape[1])
                normaliser, *left = islice(behind, 4)
                near, line = (_select(out, heads), normaliser), TokenBuffer(*left)
                piece, far[n] = _through_features(_select(query, heads), line, self.features[n], scaling, far[n], near)
                _write(piece, out, heads)
        return out.to(value.dtype), [FlatState(*parts) for parts in zip(far, found[: len(far)], strict=True)]

    def _begun(self, states: Sequence[FlatState | None], query: Tensor) -> list[FlatState]:
        """The states, empty where there are none yet."""
        return [
            layout.empty(len(query), query.device) if state is None else state
            for state, layout in zip(states, self.layouts, strict=True)
        ]

    def _decode_on_gpu(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        weight: Tensor | None,
        states: Sequence[FlatState | None],
    ) -> tuple[Tensor, list[FlatState]] | None:
        """:meth:`attend`, of one token; None if there are memories that the kernels do not take."""
        if self._decoders is None:
            self._decoders = list(map(_decoder, self.layouts)) if all(x.retains for x in self.layouts) else []
        if not self._decoders:
            return None
        log_weight, steps, after = _log_weight(key, value, weight), weight_steps(scaling, query.device), []
        out = value.new_zeros(*query.shape[:-1], value.shape[-1])
        for decoder, state in zip(self._decoders, self._begun(states, query), strict=True):
            tokens = decoder(query, key, value, log_weight, state.tokens, out, scaling, *steps)
            after.append(FlatState(None, tokens))
        return out, after


def _decoder(layout: Layout) -> Decoder:
    from dofla.attention.gpu.token import Decoder

    coded_tiers, tokens = (
        layout.coded_tiers,
        (layout.window, layout.sinks, layout.coded_tiers.counts[0], layout.coded_tiers.heavy_hitters),
    )
    return Decoder(coded_tiers.key, coded_tiers.value, layout.heads, *tokens, layout.starts)


def _log_weight(key: Tensor, value: Tensor, weight: Tensor | None) -> Tensor | None:
    """The log-weights of the tokens [B, L], float32; None without weights, when all tokens count in full."""
    return None if weight is None else _tokens(key[..., :0], value[..., :0], weight).log_weight


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
