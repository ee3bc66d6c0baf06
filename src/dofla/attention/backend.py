"""The arithmetic of a layer's call, in plain torch: what a backend with kernels overrides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakValueDictionary

from torch import Tensor

from dofla.attention.call import Call
from dofla.attention.causal import causal
from dofla.attention.chunked import chunked, recurrent
from dofla.attention.coding import Coder
from dofla.attention.coding.operations import CodeOperations
from dofla.attention.drawn import drawn_lately, exact_causal
from dofla.attention.exact import ExactPart, merge
from dofla.attention.layout import CompressedState, Layout, Layouts
from dofla.attention.state import FeatureState, TokenBuffer, accumulable


class Features(Protocol):
    """A feature map as attention uses it. One that also has ``affine(scaling, dtype)``, giving the :class:`Affine`
    maps of queries and keys, is applied by the compiled kernels themselves."""

    features: int

    def log_query(self, x: Tensor, scaling: float) -> Tensor: ...

    def log_key(self, x: Tensor, scaling: float) -> Tensor: ...


class Compressed(Protocol):
    """The KV heads of a layer whose caches are compressed: :class:`dofla.attention.CompressedHeads`."""

    layout: Layout
    layouts: Layouts

    @property
    def coders(self) -> tuple[Sequence[Coder], Sequence[Coder]]: ...

    def empty(self, call: Call) -> CompressedState: ...

    def register(self) -> int: ...


REGISTERED: WeakValueDictionary[int, Compressed] = WeakValueDictionary()
"""Heads by the id by which operators find them, since graphs hold no objects (:meth:`Compressed.register`)."""


class Backend(CodeOperations):
    """Plain torch, for any device, with gradients."""

    exact_causal, drawn_lately = staticmethod(exact_causal), staticmethod(drawn_lately)

    def takes(self, vectors: Sequence[Tensor], others: Sequence[Tensor] = ()) -> bool:
        """True if the backend does calls with these queries, keys and values, and these other inputs."""
        return True

    def traceable(self, tokens: int, compressed: bool) -> bool:
        """True if torch.compile can take a call with so many tokens, compressed or with features, into its graph."""
        return False

    def read_compressed(
        self, heads: Compressed, call: Call, state: CompressedState
    ) -> tuple[Tensor, CompressedState] | None:
        """Attention of the new tokens of a causal call, which is not exact, to themselves and to compressed caches, all
        groups of heads at once: output [B, H, L, dv] and the state after. None if there are no kernels for such a call:
        then the groups are done one by one, in plain torch."""
        return None

    def hold(self, heads: Compressed, call: Call) -> CompressedState | None:
        """The state after the tokens of a call that begins a sequence, without attention to them. None if there are no
        kernels for it."""
        return None

    def softmax(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, real: Tensor | None = None) -> Tensor:
        """:func:`dofla.attention.causal.causal`."""
        return causal(query, key, value, scaling, real)

    def retain_important(self, heads: Compressed, call: Call) -> CompressedState | None:
        """The state after the tokens of a call that begins sequences, whose importance is known; the call has its last
        queries alone, or none. None if there are no kernels for it."""
        return None

    def read_pages(
        self, heads: Compressed, call: Call, pool: Tensor, pages: Tensor, starts: list[int]
    ) -> Tensor | None:
        """:meth:`read_compressed` of the tokens of n sequences, one after the other: [L, H, 1, d]. Their states are
        updated in ``pages`` [n], int64, of a pool [P, bytes], uint8. ``starts`` [n + 1] are where each sequence begins
        among the tokens, and their number. Returns the output [L, H, 1, dv], or None."""
        return None

    def through_features(
        self,
        query: Tensor,
        tokens: TokenBuffer,
        features: Features,
        scaling: float,
        state: FeatureState,
        exact: ExactPart | None,
    ) -> tuple[Tensor, FeatureState]:
        """Causal attention of queries [B, H, L, d] to as many new tokens and to the past, through features, and to an
        exact part under the same normalizer: output [B, H, L, dv] and the state after."""
        a, b = features.log_query(accumulable(query), scaling), features.log_key(accumulable(tokens.key), scaling)
        return self.linear_attention(a, b, tokens, state, exact)

    def linear_attention(
        self, a: Tensor, b: Tensor, tokens: TokenBuffer, state: FeatureState, exact: ExactPart | None
    ) -> tuple[Tensor, FeatureState]:
        """:meth:`through_features` of log-features of queries [B, H, L, M] and keys [B, Hkv, L, M]."""
        b = b + tokens.log_weight[:, None, :, None]
        form = recurrent if a.shape[-2] == 1 else chunked
        out, normalizer, after = form(a, b, accumulable(tokens.value), state=state)
        return merge_exact(out, normalizer, exact), after


def merge_exact(out: Tensor, normalizer: Tensor, exact: ExactPart | None) -> Tensor:
    """Output of features [B, H, L, dv] and of an exact part, if there is one, under one normalizer."""
    return out if exact is None else merge((out, normalizer), exact.attend())[0]
