"""The state of a compressed cache between calls: one row of bytes for each sequence.

The compiled kernels take one row and return another. As separate tensors, two tiers would be thirty, and passing so
many costs a decoded token half as much again as the arithmetic. Plain torch works on views.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from dofla.attention.carried import State
from dofla.attention.coding import CodedTiers
from dofla.attention.eight_bits import PackedTokens
from dofla.attention.rows import Rows
from dofla.attention.state import FeatureState, Tensors, TokenBuffer

_Kind = TypeVar("_Kind", bound=Tensors)


@dataclass(frozen=True)
class FlatState(Tensors):
    """A :class:`State` in one piece, but for its ``features``: window and sinks in int8 and tiers in codes are
    the rows ``tokens`` [B, bytes], uint8, that a :class:`Layout` reads."""

    features: FeatureState | None
    tokens: Tensor


Carried = State[TokenBuffer | PackedTokens] | FlatState
"""The state that a group of heads carries from one call to the next."""


class Layout:
    """Where a group's window, sinks and tiers stand in a row of bytes: in this order, the tensors of each in the order
    of its fields.

    Args:
        coded_tiers: the tiers of the group.
        heads: its KV heads.
        features: behind them.
        window: tokens in int8.
        sinks: likewise.

    Attributes:
        sizes: all of it for the kernels (tiers.h, ``sizes_of``).
    """

    registered: ClassVar[WeakValueDictionary[int, Layout]] = WeakValueDictionary()

    def __init__(self, coded_tiers: CodedTiers, heads: Sequence[int], features: int, window: int, sinks: int) -> None:
        self.coded_tiers, self.heads = coded_tiers, list(heads)
        self.features, self.window, self.sinks = features, window, sinks
        counts = window, sinks, coded_tiers.heavy_hitters, int(features > 0)
        self.sizes = [len(heads), *heads, *counts, len(coded_tiers.counts), *coded_tiers.counts]
        empty = self._empty()
        self._kinds = [type(tokens) for tokens in empty.tiers]
        self._rows = Rows([(t.shape[1:], t.dtype) for t in _parts(empty)])
        self._before = self._rows.joined(_parts(empty))  # to make it takes as long as to read fifty tokens

    @torch.compiler.assume_constant_result
    def register(self) -> None:
        """Let operators find the layout by its id: graphs hold no objects. Done while one is traced."""
        self.registered[id(self)] = self

    @property
    def retains(self) -> bool:
        """True if it is one that :func:`dofla.compress` makes: a window, one tier with heavy hitters, no features."""
        tiers = self.coded_tiers
        return self.window > 0 and not self.features and tiers.heavy_hitters > 0 and len(tiers.counts) == 1

    @property
    def bytes(self) -> int:
        """The bytes of a row: window, sinks and tiers of one sequence."""
        return self._rows.bytes

    @property
    def parts(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of the parts of a row, in their order: [heads, tokens, ...], or [tokens] of what all share."""
        return self._rows.parts

    @property
    def starts(self) -> list[int]:
        """Where the parts begin in a row, in their order."""
        return self._rows.starts

    def empty(self, batch: int, device: torch.device) -> FlatState:
        """The state before the first token."""
        sizes = batch, len(self.heads), self.features, self.coded_tiers.value.dim
        features = FeatureState.empty(*sizes, device=device) if self.features else None
        return FlatState(features, self._before.to(device).repeat(batch, 1))

    def flat(self, state: State[TokenBuffer | PackedTokens]) -> FlatState:
        """A state in int8 and in codes in one piece."""
        return FlatState(state.features, self._rows.joined(_parts(state)))

    def opened(self, state: FlatState) -> State[PackedTokens]:
        """The reverse of :meth:`flat`: views."""
        parts = iter(self._rows.cut(state.tokens))
        window, sinks = (_taken(PackedTokens, parts) if count else None for count in (self.window, self.sinks))
        return State(state.features, window, sinks, tuple(_taken(kind, parts) for kind in self._kinds))

    def _empty(self) -> State[PackedTokens]:
        """The empty state of one sequence, but for its features, in int8 and in codes."""
        device, dims = torch.device("cpu"), (self.coded_tiers.key.dim, self.coded_tiers.value.dim)
        key, value = (torch.empty(1, len(self.heads), 0, dim, dtype=torch.float32, device=device) for dim in dims)
        window, sinks = (
            PackedTokens.of(TokenBuffer.empty(key, value, count)) if count else None
            for count in (self.window, self.sinks)
        )
        return State(None, window, sinks, self.coded_tiers.empty(1, device))


def _parts(state: State[TokenBuffer | PackedTokens]) -> list[Tensor]:
    kept = (state.window, state.sinks, *state.tiers)
    return [part for tokens in kept if tokens is not None for part in vars(tokens).values()]


def _taken(kind: type[_Kind], parts: Iterator[Tensor]) -> _Kind:
    return kind(**{field.name: next(parts) for field in fields(kind)})
