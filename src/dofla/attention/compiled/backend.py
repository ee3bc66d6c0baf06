"""The backend of C++ kernels, for CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from dofla.attention import compiled
from dofla.attention.backend import Backend, Features, Packed
from dofla.attention.coding import Coder
from dofla.attention.coding.levels import TABLES
from dofla.attention.coding.operations import Coded
from dofla.attention.compiled.tiers import attend_and_code, attend_and_code_in_pages, encode
from dofla.attention.exact import ExactPart
from dofla.attention.flat import Layout
from dofla.attention.state import FeatureState, TokenBuffer, accumulable

DTYPES = (torch.float32, torch.bfloat16)
"""Types of the vectors that the kernels of compressed caches take."""


class Compiled(Backend):
    """C++ kernels for a CPU, where no derivative is asked for."""

    def traceable(self, tokens: int, retains: bool) -> bool:
        return True

    def takes(self, vectors: Sequence[Tensor], others: Sequence[Tensor] = ()) -> bool:
        return compiled.usable(vectors, others, DTYPES)

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
        if query.shape[-2] == 0:
            return None
        constants, sizes = _constants(layouts)
        out, *found = attend_and_code(query, key, value, log_weight, states, *constants, TABLES, sizes, scaling)
        rest = iter(found[len(layouts) :])
        behind = [(next(rest), TokenBuffer(*islice(rest, 3))) for layout in layouts if layout.features]
        return Packed(out, found[: len(layouts)], behind)

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
        constants, sizes = _constants(layouts)
        return attend_and_code_in_pages(query, key, value, pools, pages, starts, *constants, TABLES, sizes, scaling)

    def encode(self, coders: Sequence[Coder], vectors: Sequence[Tensor]) -> list[Coded]:
        if not compiled.usable(vectors, (), DTYPES):
            return super().encode(coders, vectors)
        pairs = zip(coders, vectors, strict=True)
        return [encode(x, coder.constants, TABLES, len(coder.tiers)) for coder, x in pairs]

    def through_features(
        self,
        query: Tensor,
        tokens: TokenBuffer,
        features: Features,
        scaling: float,
        state: FeatureState,
        exact: ExactPart | None,
    ) -> tuple[Tensor, Tensor, FeatureState]:
        if hasattr(features, "affine"):
            query, key, value = (accumulable(t) for t in (query, tokens.key, tokens.value))
            maps = features.affine(scaling, query.dtype)
            parts = [t for m in maps for t in (m.weight, m.bias)]
            if _usable([query, key, value], [tokens.log_weight, *parts], state, exact):
                tokens = TokenBuffer(key, value, tokens.log_weight)
                return compiled.linear_attention(query, tokens, state, maps, exact)
        return super().through_features(query, tokens, features, scaling, state, exact)

    def linear_attention(
        self, a: Tensor, b: Tensor, tokens: TokenBuffer, state: FeatureState, exact: ExactPart | None
    ) -> tuple[Tensor, Tensor, FeatureState]:
        value = accumulable(tokens.value)
        if not _usable([a, b, value], [tokens.log_weight], state, exact):
            return super().linear_attention(a, b, tokens, state, exact)
        return compiled.linear_attention(a, TokenBuffer(b, value, tokens.log_weight), state, exact=exact)


def _constants(layouts: Sequence[Layout]) -> tuple[tuple[list[Tensor], list[Tensor]], list[int]]:
    """Constants of the coders of keys and of values, and sizes, of the groups of a layer."""
    coders = [(layout.coded_tiers.key, layout.coded_tiers.value) for layout in layouts]
    # As an attribute it takes ten times as long to find; torch's type says that a buffer may be None.
    keys, values = ([coder._buffers["constants"] for coder in side] for side in zip(*coders, strict=True))
    return (keys, values), [number for layout in layouts for number in layout.sizes]  # type: ignore[return-value]


def _usable(vectors: list[Tensor], others: list[Tensor], state: FeatureState, exact: ExactPart | None) -> bool:
    """True if the kernels take these, the state and the exact part; features may train where queries do not."""
    others += [state.mean, state.log_mass]
    if exact is not None:
        vectors += [exact.query, exact.near.key, exact.near.value]
        others += [exact.near.log_weight, exact.sinks.key, exact.sinks.value, exact.sinks.log_weight]
    return compiled.usable(vectors, others)
