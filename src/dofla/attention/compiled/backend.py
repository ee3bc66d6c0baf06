"""The backend of C++ kernels, for CPUs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dofla.attention import compiled
from dofla.attention.backend import Backend, Compressed, Features
from dofla.attention.call import Call
from dofla.attention.coding import Coder
from dofla.attention.coding.coder import Codes
from dofla.attention.coding.levels import TABLES
from dofla.attention.constants import LOG_ZERO
from dofla.attention.eight_bits import pack
from dofla.attention.exact import ExactPart
from dofla.attention.layout import CompressedState
from dofla.attention.state import FeatureState, TokenBuffer, accumulable

DTYPES = (torch.float32, torch.bfloat16)
"""Types of the vectors that the kernels of compressed caches take."""


class Compiled(Backend):
    """C++ kernels for a CPU, where no derivative is asked for."""

    def traceable(self, tokens: int, compressed: bool) -> bool:
        return True

    def takes(self, vectors: Sequence[Tensor], others: Sequence[Tensor] = ()) -> bool:
        return compiled.usable(vectors, others, DTYPES)

    def read_compressed(
        self, heads: Compressed, call: Call, state: CompressedState
    ) -> tuple[Tensor, CompressedState] | None:
        return None if call.query.shape[-2] == 0 else _read(heads, call, state)

    def hold(self, heads: Compressed, call: Call) -> CompressedState | None:
        return _read(heads, call._replace(in_place=True), heads.empty(call), attend=False)[1]

    def softmax(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, real: Tensor | None = None) -> Tensor:
        if not compiled.usable((query, key, value), (), DTYPES):
            return super().softmax(query, key, value, scaling, real)
        real = None if real is None else real.expand(key.shape[:3]).contiguous()
        return torch.ops.dofla.softmax_attention.default(query, key, value, scaling, real)

    def retain_important(self, heads: Compressed, call: Call) -> CompressedState | None:
        assert call.importance is not None
        state, rows = heads.empty(call), [slice(None)]
        counts = [call.key.shape[2]]
        if call.log_weight is not None:  # each sequence as it is alone, without the padding in front of it
            counts = (call.log_weight > LOG_ZERO).sum(1).tolist()
            rows = [slice(n, n + 1) for n in range(len(counts))]
        layer = _of_layer(heads, call, state.rows)
        for own, count in zip(rows, counts, strict=True):
            if count:
                query, key, value, importance = (x[own, :, -count:] for x in (*call.vectors, call.importance))
                vectors = query, key, value, importance.float().contiguous()
                torch.ops.dofla.retain_important.default(*vectors, state.rows[own], *layer)
        return state

    def read_pages(
        self, heads: Compressed, call: Call, pool: Tensor, pages: Tensor, starts: list[int]
    ) -> Tensor | None:
        return torch.ops.dofla.read_pages.default(*call.vectors, pool, pages, starts, *_of_layer(heads, call, pool))

    def encode(self, coders: Sequence[Coder], vectors: Sequence[Tensor]) -> list[Codes]:
        if not compiled.usable(vectors, (), DTYPES):
            return super().encode(coders, vectors)
        packed = [[part.contiguous() for part in pack(x)] for x in vectors]
        pairs = zip(coders, packed, strict=True)
        return [torch.ops.dofla.encode.default(*own, coder.constants, TABLES) for coder, own in pairs]

    def decode(self, coder: Coder, codes: Codes) -> Tensor:
        if not compiled.usable((), codes):
            return super().decode(coder, codes)
        parts = [part.contiguous() for part in codes]
        return coder.unrotate(torch.ops.dofla.decode.default(*parts, coder.constants, TABLES, coder.dim))

    def through_features(
        self,
        query: Tensor,
        tokens: TokenBuffer,
        features: Features,
        scaling: float,
        state: FeatureState,
        exact: ExactPart | None,
    ) -> tuple[Tensor, FeatureState]:
        if hasattr(features, "affine"):
            query, key, value = (accumulable(t) for t in (query, tokens.key, tokens.value))
            maps = features.affine(scaling, query.dtype)
            parts = [t for m in maps for t in (m.weight, m.bias)]
            if _usable([query, key, value], [tokens.log_weight, *parts], state, exact):
                tokens = TokenBuffer(key, value, tokens.log_weight)
                out, _, after = compiled.linear_attention(query, tokens, state, maps, exact)
                return out, after
        return super().through_features(query, tokens, features, scaling, state, exact)

    def linear_attention(
        self, a: Tensor, b: Tensor, tokens: TokenBuffer, state: FeatureState, exact: ExactPart | None
    ) -> tuple[Tensor, FeatureState]:
        value = accumulable(tokens.value)
        if not _usable([a, b, value], [tokens.log_weight], state, exact):
            return super().linear_attention(a, b, tokens, state, exact)
        out, _, after = compiled.linear_attention(a, TokenBuffer(b, value, tokens.log_weight), state, exact=exact)
        return out, after


def _read(heads: Compressed, call: Call, state: CompressedState, attend: bool = True) -> tuple[Tensor, CompressedState]:
    rows = state.rows
    if not call.in_place or (rows.is_inference() and not torch.is_inference_mode_enabled()):
        rows = rows.clone()
    layer = _of_layer(heads, call, rows)
    # As `.default`, which torch finds sooner.
    out = torch.ops.dofla.read_compressed.default(*call.vectors, call.log_weight, rows, *layer, attend)
    return out, CompressedState(rows)


def _of_layer(heads: Compressed, call: Call, states: Tensor) -> tuple[Any, ...]:
    """The arguments of operators for a layer: what smooths its keys, constants of its coders of keys and of values,
    tables, scaling of scores, its heads by group, and the groups' numbers in these states."""
    # As an attribute a buffer takes ten times as long to find.
    smoothing = [] if call.smoothing is None else list(call.smoothing._buffers.values())
    keys, values = ([coder._buffers["constants"] for coder in side] for side in heads.coders)
    return smoothing, keys, values, TABLES, call.scaling, heads.layout.order, heads.layouts.of(states.shape[-1]).numbers


def _usable(vectors: list[Tensor], others: list[Tensor], state: FeatureState, exact: ExactPart | None) -> bool:
    """True if the kernels take these, the state and the exact part; features may train where queries do not."""
    others += [state.mean, state.log_mass]
    if exact is not None:
        vectors += [exact.query, exact.near.key, exact.near.value]
        others += [exact.near.log_weight, exact.sinks.key, exact.sinks.value, exact.sinks.log_weight]
    return compiled.usable(vectors, others)
