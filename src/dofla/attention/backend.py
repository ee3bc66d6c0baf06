"""The arithmetic of a layer's call, in plain torch: what a backend with kernels overrides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from dofla.attention.chunked import chunked
from dofla.attention.coding.operations import CodeOperations
from dofla.attention.drawn import Drawn, Line, exact_causal
from dofla.attention.exact import ExactPart, merge
from dofla.attention.flat import Layout
from dofla.attention.recurrent import recurrent
from dofla.attention.state import FeatureState, TokenBuffer, accumulable


class Features(Protocol):
    """A feature map as attention uses it. One that also has ``affine(scaling, dtype)``, giving the :class:`Affine`
    maps of queries and keys, is applied by the compiled kernels themselves."""

    features: int

    def log_query(self, x: Tensor, scaling: float) -> Tensor: ...

    def log_key(self, x: Tensor, scaling: float) -> Tensor: ...


class Packed(NamedTuple):
    """Result of reading new tokens with packed caches.

    Attributes:
        out: [B, H, L, dv], zeros of heads in no group; float32 if there are features behind any group's tiers.
        states: of each group, [B, bytes], uint8.
        behind: of each group with features, the log-normalizer [B, H', L] of its heads' output and the tokens that left
            its last tier; empty if there are none.
    """

    out: Tensor
    states: list[Tensor]
    behind: list[tuple[Tensor, TokenBuffer]]


class Backend(CodeOperations):
    """Plain torch, for any device, with gradients."""

    def takes(self, vectors: Sequence[Tensor], others: Sequence[Tensor] = ()) -> bool:
        """True if the backend does calls with these queries, keys and values, and these other inputs."""
        return True

    def traceable(self, tokens: int, retains: bool) -> bool:
        """True if torch.compile can take a call with so many new tokens into its graph, of a layer all of whose heads
        have caches that retain tokens, or of one with others."""
        return False

    def read_packed(
        self,
        layouts: Sequence[Layout],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_weight: Tensor | None,
        states: list[Tensor],
        scaling: float,
        in_place: bool,
    ) -> Packed | None:
        """Attention of new tokens to themselves and to packed caches, all groups of heads at once.

        Args:
            layouts: of the groups.
            query: [B, H, L, d].
            key: [B, Hkv, L, d].
            value: [B, Hkv, L, dv].
            log_weight: [B, L], LOG_ZERO for padding; None where there is none.
            states: of each group before, [B, bytes], uint8.
            scaling: of the scores.
            in_place: whether the states may be overwritten with those after.

        Returns:
            None if there are no kernels for such a call: then the groups are done one by one, unpacked.
        """
        return None

    def read_pages(
        self,
        layouts: Sequence[Layout],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pools: list[Tensor],
        pages: Tensor,
        starts: list[int],
        scaling: float,
    ) -> Tensor | None:
        """:meth:`read_packed` of n sequences of different lengths, whose states are pages of pools, and are updated
        there.

        Args:
            layouts: of the groups, which have no features.
            query: of all sequences, one after the other, [1, H, L, d].
            key, value: likewise, [1, Hkv, L, d] and [1, Hkv, L, dv].
            pools: of each group [P, bytes], uint8.
            pages: of each sequence [n], int64.
            starts: where each sequence begins among the tokens, and their number, [n + 1].
            scaling: of the scores.

        Returns:
            Output [1, H, L, dv], zeros of heads in no group; None if there are no kernels for such a call.
        """
        return None

    def through_features(
        self,
        query: Tensor,
        tokens: TokenBuffer,
        features: Features,
        scaling: float,
        state: FeatureState,
        exact: ExactPart | None,
    ) -> tuple[Tensor, Tensor, FeatureState]:
        """Causal attention of queries [B, H, L, d] to as many new tokens and to the past, through features.

        Returns:
            Output [B, H, L, dv], which is that of the exact part as well; the log-normalizer [B, H, L] of the features
            alone; and the state after.
        """
        a, b = features.log_query(accumulable(query), scaling), features.log_key(accumulable(tokens.key), scaling)
        return self.linear_attention(a, b, tokens, state, exact)

    def linear_attention(
        self, a: Tensor, b: Tensor, tokens: TokenBuffer, state: FeatureState, exact: ExactPart | None
    ) -> tuple[Tensor, Tensor, FeatureState]:
        """:meth:`through_features` of log-features of queries [B, H, L, M] and keys [B, Hkv, L, M]."""
        b = b + tokens.log_weight[:, None, :, None]
        form = recurrent if a.shape[-2] == 1 else chunked
        out, normalizer, after = form(a, b, accumulable(tokens.value), state=state)
        return joined(out, normalizer, exact), normalizer, after

    def exact_causal(self, query: Tensor, line: Line, window: int, sinks: int, scaling: float) -> tuple[Tensor, Drawn]:
        """:func:`dofla.attention.drawn.exact_causal`."""
        return exact_causal(query, line, window, sinks, scaling)


def joined(out: Tensor, normalizer: Tensor, exact: ExactPart | None) -> Tensor:
    """Output of features [B, H, L, dv] and of an exact part, if there is one, under one normalizer."""
    return out if exact is None else merge((out, normalizer), exact.attend())[0]
