"""Bytes of the state of heads with features."""

from __future__ import annotations

from dataclasses import dataclass

FEATURE_BYTES = 4
"""Per number of the feature state, which accumulates over the whole past and stays in float32 whatever the model's
dtype."""

TOKEN_DTYPES = ("int8", "model")
"""Storage of exact tokens: eight bits with one power of two per vector (:class:`dofla.attention.PackedTokens`), or the
model's dtype."""


@dataclass(frozen=True)
class HeadCost:
    """Bytes of state per KV head.

    Attributes:
        feature: of one feature, a mean value and a log-mass of double size.
        token: of one token of the window or the sinks, a key and a value.
        cached: of one token in the cache of softmax attention, a key and a value in the model's dtype.
    """

    feature: int
    token: int
    cached: int

    @classmethod
    def of(cls, head_dim: int, value_dim: int, itemsize: int, token_dtype: str = "model") -> HeadCost:
        """``itemsize``: bytes of a number in the model's dtype; ``token_dtype``: one of :data:`TOKEN_DTYPES`."""
        cached = itemsize * (head_dim + value_dim)
        token = head_dim + value_dim + 2 if token_dtype == "int8" else cached  # two exponents
        return cls(FEATURE_BYTES * (value_dim + 2), token, cached)

    def total(self, features: int, window: int, sinks: int) -> int:
        """Bytes of a head with these."""
        return features * self.feature + (window + sinks) * self.token
