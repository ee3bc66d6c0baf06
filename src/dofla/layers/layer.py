"""A layer's attention: its groups of KV heads one after the other."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from dofla.attention import Call, CompressedHeads, HeadGroup, KeySmoothing, log_weights
from dofla.attention.heads import query_heads, write
from dofla.attention.modules import ModuleList
from dofla.attention.state import Tensors
from dofla.feature_maps import FeatureMap
from dofla.feature_maps.heads import FeatureHeads
from dofla.layers.predictor import ImportancePredictor

Layer = TypeVar("Layer")
P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(method: Callable[Concatenate[Layer, Tensor, P], R]) -> Callable[Concatenate[Layer, Tensor, P], R]:
    """For functions that take exponents: mixed-precision training would halve the precision of the products in them."""

    @wraps(method)
    def call(self: Layer, query: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        device = "cpu" if query.is_cpu else query.device.type
        if query.is_meta or not torch.is_autocast_enabled(device):  # on meta, asking raises
            return method(self, query, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return method(self, query, *args, **kwargs)

    return call


class AttentionLayer(nn.Module):
    """Attention of one module.

    Args:
        groups: of KV heads, which have all of the layer's.
        smoothing: what keys and queries go through first, if anything.
        predictor: of the importance of tokens, if it was measured.
    """

    def __init__(
        self,
        groups: Sequence[HeadGroup[Any]],
        smoothing: KeySmoothing | None = None,
        predictor: ImportancePredictor | None = None,
    ) -> None:
        super().__init__()
        self.groups: ModuleList[HeadGroup[Any]] = ModuleList(groups)
        self.smoothing, self.predictor = smoothing, predictor

    @property
    def kv_heads(self) -> int:
        """Number of KV heads of the layer."""
        return sum(len(group.heads) for group in self.groups)

    @property
    def compressed(self) -> CompressedHeads | None:
        """The compressed heads, where all heads are."""
        first = self.groups[0]
        return first if len(self.groups) == 1 and isinstance(first, CompressedHeads) else None

    @property
    def maps(self) -> list[FeatureMap]:
        """The feature maps of the groups that have one."""
        return [group.map for group in self.groups if isinstance(group, FeatureHeads)]

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all parameters anew, in the order of the groups."""
        for group in self.groups:
            group.reset_parameters(generator)
        if self.smoothing is not None:
            self.smoothing.reset()
        if self.predictor is not None:
            self.predictor.reset()

    def smooth(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, H, L, d] and keys [B, Hkv, L, d] as all of the layer's arithmetic takes them."""
        return (query, key) if self.smoothing is None else self.smoothing(query, key)

    @without_autocast
    def predicted(self, hidden: Tensor) -> Tensor:
        """The importance [B, Hkv, L] that is predicted of tokens by what the module reads [B, L, D]."""
        assert self.predictor is not None
        return self.predictor(hidden)

    @without_autocast
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        weight: Tensor | None = None,
        states: Sequence[Tensors] | None = None,
        causal: bool = True,
        exact: bool = False,
        in_place: bool = False,
        room: int | None = None,
        importance: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensors]]:
        """Attention of the new tokens.

        Args:
            query: [B, H, L, d].
            key: [B, Hkv, L, d].
            value: [B, Hkv, L, dv].
            scaling: of the scores.
            weight: key weights [B, L], 0 for padding, which only stands in front of a sequence's first token; 1 for
                all other tokens of a compressed cache.
            states: one per group, or None at the beginning of a sequence.
            causal: whether queries see only earlier keys (and themselves).
            exact, room, importance: see :class:`dofla.attention.Call`; for compressed caches.
            in_place: whether ``states`` may be overwritten with those after the call.

        Returns:
            Output [B, H, L, dv], and the states after the last token (empty unless causal).
        """
        log_weight = None if weight is None else log_weights(weight)
        options = causal, exact, in_place, room, self.smoothing, importance
        call = Call(query, key, value, scaling, log_weight, *options)
        if len(self.groups) == 1:
            out, after = self.groups[0].step(call, states[0] if states else None)
            return out, [] if after is None else [after]
        call = call.smoothed()
        out, found = call.new_output(), []
        for n, group in enumerate(self.groups):
            piece, after = group.step(call.of_heads(group.heads), states[n] if states else None)
            write(piece, out, query_heads(group.heads, call.groups))
            found += [] if after is None else [after]
        return out, found

    def resized(self, states: Sequence[Tensors], tokens: int) -> list[Tensors]:
        """States with room for so many tokens, those that grow with them."""
        return [group.resized(state, tokens) for group, state in zip(self.groups, states, strict=True)]

    def joined(self, states: Sequence[Sequence[Tensors]]) -> list[Tensors]:
        """The states of several sequences as one, in this order."""
        return [group.joined(own) for group, own in zip(self.groups, zip(*states, strict=True), strict=True)]

    def traceable(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        weight: Tensor | None,
        states: Sequence[Tensors] | None,
        causal: bool,
        room: int | None,
    ) -> bool:
        """True if torch.compile can take such a call of :meth:`forward` into its graph."""
        call = Call(query, key, value, 1.0, weight, causal, room=room)
        held = states is not None and len(states) > 0  # torch 2.11 does not trace bool() of a list
        return all(group.traceable(call, held) for group in self.groups)
