"""The state that a layer's heads carry from one call to the next: as the arithmetic takes it, and packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from dofla.attention.coding import CodedTokens, ScoredTokens
from dofla.attention.eight_bits import PackedTokens
from dofla.attention.state import FeatureState, Tensors, TokenBuffer, known_full

_Exact = TypeVar("_Exact", bound=TokenBuffer | PackedTokens, covariant=True)
"""Type of the local window and the attention sinks."""


@dataclass(frozen=True)
class State(Tensors, Generic[_Exact]):
    """Everything a layer's heads carry: the state of its features, if there are any, the last ``window`` tokens, the
    first ``sinks`` ones, and between window and features those of each tier of a compressed cache.

    Window and tiers are delay lines in front of the feature state: a key goes to the first tier when it leaves
    ``window``, from tier to tier as it ages, and enters ``features`` when it leaves the last, unless it is one of the
    first real keys, which go to ``sinks`` instead. Window and sinks are kept as :class:`dofla.attention.PackedTokens`
    from one call to the next where the layer says so, the tokens of ``tiers`` as :class:`dofla.attention.CodedTokens`,
    or, in a last tier that keeps what draws attention, as :class:`dofla.attention.ScoredTokens`; where a layer has
    both, all in one piece, as :class:`dofla.attention.FlatState`.
    """

    features: FeatureState | None
    window: _Exact | None = None
    sinks: _Exact | None = None
    tiers: tuple[CodedTokens | ScoredTokens, ...] = ()


def unpacked(state: State[TokenBuffer | PackedTokens], dtype: torch.dtype) -> State[TokenBuffer]:
    """The state for arithmetic in ``dtype``, in which exact tokens that are not packed are already."""
    window, sinks = (t.unpacked(dtype) if isinstance(t, PackedTokens) else t for t in (state.window, state.sinks))
    return State(state.features, window, sinks, state.tiers)


def packed(
    after: State[TokenBuffer], before: State[TokenBuffer | PackedTokens] | None, new: int
) -> State[PackedTokens]:
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
    return State(after.features, window, sinks, after.tiers)
