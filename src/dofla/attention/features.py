"""Causal attention to the past through features, and to exact parts beside it, under one normalizer."""

from __future__ import annotations

from torch import Tensor

from dofla.attention.backend import Backend, Features
from dofla.attention.exact import ExactPart, merge
from dofla.attention.state import FeatureState, TokenBuffer


def causal_attention(
    query: Tensor,
    tokens: TokenBuffer,
    features: Features,
    *,
    scaling: float,
    state: FeatureState | None,
    backend: Backend,
    exact: ExactPart | None = None,
    near: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, FeatureState | None]:
    """Causal attention of queries [B, H, L, d] to as many new tokens and to the past through features, and to an exact
    part under the same normalizer; ``near``, output and log-normalizer of attention to yet other tokens, joins them.

    Returns:
        Output [B, H, L, dv] and the state after; there is none without features.
    """
    exact = exact and exact.widened()
    if exact is not None and (near is not None or state is None):
        # The kernels know features beside a window and sinks, and nothing else.
        beside = exact.attend()
        near, exact = beside if near is None else merge(near, beside), None
    if state is None:
        return query.new_zeros(*query.shape[:-1], tokens.value.shape[-1]) if near is None else near[0], None
    out, normalizer, after = backend.through_features(query, tokens, features, scaling, state, exact)
    return (out if near is None else merge((out, normalizer), near)[0]), after


def segment(numbers: int, query: Tensor) -> int:
    """Number of tokens to do at once, if each has so many log-features of queries: on a CPU few enough to stay in its
    cache, on a GPU few enough to take little of its memory."""
    at_once = 2**20 if query.device.type == "cpu" else 2**26
    return max(at_once // max(numbers, 1) // 64 * 64, 128)
