"""Taking tokens back out of a cache: for assisted (speculative) decoding, whose candidates may be refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dofla.attention.state import Tensors

LEAST = 64
"""Tokens that can be taken back at any time, where so many were read."""

Vectors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""Queries [B, H, L, d], keys [B, Hkv, L, d], values [B, Hkv, L, dv], key weights [B, L] and importance [B, Hkv, L] of a
call."""
Read = Callable[..., tuple[Tensor, Sequence[Tensors]]]
"""The output of a call and the states after it, of the call and the states before it. Options say whether it may
overwrite these (``in_place``), and whether its tokens attend exactly to one another (``exact``)."""


def _cut(vectors: Vectors, tokens: slice) -> Vectors:
    """Some tokens of a call."""
    query, key, value, weight, importance = vectors
    weight = None if weight is None else weight[:, tokens]
    importance = None if importance is None else importance[:, :, tokens]
    return query[:, :, tokens], key[:, :, tokens], value[:, :, tokens], weight, importance


@dataclass
class _Since:
    """A state, and the calls after it."""

    states: list[Tensors] | None
    calls: list[tuple[Vectors, Read]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(vectors[1].shape[-2] for vectors, _ in self.calls)


class History:
    """The last tokens of a layer: a state from before :data:`LEAST` of them, or more, and the calls that read them.

    A state of constant size has lost what it evicted, and cannot be taken back; an earlier one can be read on from.
    Attention alone is computed again, no weights.
    """

    def __init__(self) -> None:
        self._parts: list[_Since] = []

    def read(
        self, read: Read, vectors: Vectors, states: Sequence[Tensors] | None, *, exact: bool, in_place: bool
    ) -> tuple[Tensor, Sequence[Tensors]]:
        """The result of ``read``, whose last :data:`LEAST` tokens are remembered. These come one by one, so that what
        is left of them when others are taken back is what it would be without."""
        first, outputs = max(vectors[1].shape[-2] - LEAST, 0), []
        if first:
            out, states = read(_cut(vectors, slice(first)), states, exact=exact, in_place=in_place)
            outputs.append(out)
        last = (*_cut(vectors, slice(first, None))[:-1], None)
        self._add(states, last, read)
        out, states = read(last, states, in_place=in_place)
        return torch.cat([*outputs, out], 2), states

    def _add(self, states: Sequence[Tensors] | None, vectors: Vectors, read: Read) -> None:
        """A call of :data:`LEAST` tokens at most, and the states before it, of which a copy is made every so often."""
        if not self._parts or self._parts[-1].tokens >= LEAST:
            before = None if states is None else [state.copy() for state in states]
            self._parts = [*self._parts[-1:], _Since(before)]
        query, key, value, weight, _ = vectors
        kept = query.clone(), key.clone(), value.clone(), weight, None  # not those of a whole prompt
        self._parts[-1].calls.append((kept, read))

    def before(self, tokens: int) -> Sequence[Tensors] | None:
        """The states before the last ``tokens``, which can be asked for once; ValueError with the number of those that
        there are, if these are fewer."""
        left = sum(part.tokens for part in self._parts) - tokens
        if left < 0:
            raise ValueError(left + tokens)
        part = self._parts[0]
        if left >= part.tokens and len(self._parts) > 1:
            left, part = left - part.tokens, self._parts[1]
        states: Sequence[Tensors] | None = part.states
        for vectors, read in part.calls:
            if left:
                own = _cut(vectors, slice(left))
                _, states = read(own, states, in_place=True)
                left -= own[1].shape[-2]
        return states
