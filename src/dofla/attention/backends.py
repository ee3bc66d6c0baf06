"""Which form of the arithmetic does the work: all give the same results, and the fastest that can is taken."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from dofla.attention import compiled, gpu
from dofla.attention.chunked import chunked
from dofla.attention.exact import ExactPart, merge
from dofla.attention.recurrent import recurrent
from dofla.attention.state import FeatureState, TokenBuffer, accumulable


class Features(Protocol):
    """The interface of a feature map that attention uses. The compiled kernels themselves apply a map that also has
    ``affine(scaling, dtype)``, which gives the :class:`Affine` maps of queries and keys."""

    features: int

    def log_query(self, x: Tensor, scaling: float) -> Tensor: ...

    def log_key(self, x: Tensor, scaling: float) -> Tensor: ...


def causal_attention(
    query: Tensor,
    tokens: TokenBuffer,
    features: Features,
    *,
    scaling: float,
    state: FeatureState | None,
    exact: ExactPart | None = None,
    near: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, FeatureState | None]:
    """Causal attention of queries [B, H, L, d] to as many new tokens and to the past through features, and to an exact
    part under the same normaliser; ``near``, output and log-normaliser of attention to yet other tokens, joins them.

    Returns:
        Output [B, H, L, dv] and the state after; there is none without features.
    """
    if exact is not None and (near is not None or not features.features):
        # The kernels know features beside a window and sinks, and nothing else.
        beside = exact.widened().attend()
        near, exact = beside if near is None else merge(near, beside), None
    if not features.features:
        unseen = near is None
        return (query.new_zeros(*query.shape[:-1], tokens.value.shape[-1]) if unseen else near[0]), state
    out, normaliser, after = _through_features(query, tokens, features, scaling, state, exact)
    return (out if near is None else merge((out, normaliser), near)[0]), after


def _through_features(
    query: Tensor, tokens: TokenBuffer, features: Features, scaling: float, state: FeatureState, exact: ExactPart | None
) -> tuple[Tensor, Tensor, FeatureState]:
    """Output, which is that of the exact part as well; log-normaliser of the features alone; and the state after."""
    given = tokens.value
    query, key, value = (accumulable(t) for t in (query, tokens.key, given))
    tokens = TokenBuffer(key, value, tokens.log_weight)
    exact = exact and exact.widened()
    vectors, others = [value], [tokens.log_weight, state.mean, state.log_mass]
    if exact is not None:
        vectors += [exact.query, exact.near.key, exact.near.value]
        others += [exact.near.log_weight, exact.sinks.key, exact.sinks.value, exact.sinks.log_weight]
    if hasattr(features, "affine"):
        maps = features.affine(scaling, query.dtype)
        parts = [t for m in maps for t in (m.weight, m.bias)]
        if compiled.usable([query, key, *vectors], [*parts, *others]):
            return compiled.linear_attention(query, tokens, state, maps, exact)
    a, b = features.log_query(query, scaling), features.log_key(key, scaling)
    if compiled.usable([a, b, *vectors], others):
        return compiled.linear_attention(a, TokenBuffer(b, value, tokens.log_weight), state, exact=exact)
    b = b + tokens.log_weight[:, None, :, None]
    if gpu.usable(a, b, given, state.mean):
        out, normaliser, after = gpu.linear_attention(a, b, given, state=state)
    else:
        form = recurrent if a.shape[-2] == 1 else chunked
        out, normaliser, after = form(a, b, value, state=state)
    return (out if exact is None else merge((out, normaliser), exact.attend())[0]), normaliser, after


def segment(numbers: int, query: Tensor) -> int:
    """The number of tokens to process at once, each with ``numbers`` log-features of queries: few enough to stay in the
    cache of a CPU, or to take little of the memory of a GPU."""
    at_once = 2**20 if query.device.type == "cpu" else 2**26
    return max(at_once // max(numbers, 1) // 64 * 64, 128)
