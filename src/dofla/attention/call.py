"""A call of a layer's attention: new tokens, and what is to be done with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from dofla.attention.coding.smoothing import KeySmoothing
from dofla.attention.heads import query_heads, select


class Call(NamedTuple):
    """
    Attributes:
        query: [B, H, L, d].
        key: [B, Hkv, L, d].
        value: [B, Hkv, L, dv].
        scaling: of the scores.
        log_weight: [B, L], logarithms of key weights, LOG_ZERO for padding; None where nothing is padded. Padding only
            stands in front of a sequence's first token.
        causal: whether queries see only earlier keys (and themselves).
        exact: whether several tokens attend exactly to one another, and those to retain are selected at the end of the
            call (:func:`dofla.attention.prefill.exact_prefill`). Otherwise they attend to what the cache would hold if
            they came one by one.
        in_place: whether the state may be overwritten with the one after the call.
        room: tokens of a sequence that a state is to have room for, in heads that hold every one; None for what it has.
        smoothing: what keys and queries are to go through first, if anything.
        importance: [B, Hkv, L], by which tokens are retained at the end of the call, beside the attention of its last
            queries, of an exact call: the sums of the squared weights that they will get, measured or predicted. Where
            there are no queries (of theirs L is 0), it decides alone; where it is None, all queries decide.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    log_weight: Tensor | None = None
    causal: bool = True
    exact: bool = False
    in_place: bool = False
    room: int | None = None
    smoothing: KeySmoothing | None = None
    importance: Tensor | None = None

    @property
    def groups(self) -> int:
        """Query heads of a KV head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def vectors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def smoothed(self) -> Call:
        """The same when keys and queries have gone through ``smoothing``."""
        if self.smoothing is None:
            return self
        query, key = self.smoothing(self.query, self.key)
        return self._replace(query=query, key=key, smoothing=None)

    def new_output(self) -> Tensor:
        """An output [B, H, L, dv], to be filled."""
        return self.value.new_empty(*self.query.shape[:-1], self.value.shape[-1])

    def of_heads(self, heads: Sequence[int]) -> Call:
        """The same of some KV heads and their queries, in this order."""
        if list(heads) == list(range(self.key.shape[1])):
            return self
        own = select(self.query, query_heads(heads, self.groups))
        importance = None if self.importance is None else select(self.importance, heads)
        key, value = select(self.key, heads), select(self.value, heads)
        return self._replace(query=own, key=key, value=value, importance=importance)
