"""Division of the bytes of a hybrid layer: exact tokens (sinks and a window), and features for the far past."""

from dofla.errors import DoflaError
from dofla.feature_maps.cost import HeadCost

TOKEN_SHARE = 0.73
"""Fraction of the bytes that exact tokens get. On SmolLM2 fractions from 0.65 to 0.85 are within 5 % of one another in
attention KL, for tokens in bfloat16 as in float32 (``docs/research/features.md``)."""

SINKS = 2


def default_token_dtype(causal: bool) -> str:
    """The default storage of exact tokens in hybrid layers: eight bits, but for an encoder's, which keep nothing."""
    return "int8" if causal else "model"


FEATURE_MAP = "mlp"
"""Default feature map of hybrid layers."""


def split(bytes_per_head: int, cost: HeadCost, share: float = TOKEN_SHARE) -> tuple[int, int, int]:
    """(features, window, sinks) of at most ``bytes_per_head``, about ``share`` of it in exact tokens.

    There is at least one feature, even if it alone costs more. Rounding leaves less than one feature's bytes unspent,
    and goes to the window as far as whole tokens fit.
    """
    features = max(1, round(bytes_per_head * (1 - share) / cost.feature))
    while features > 1 and features * cost.feature > bytes_per_head:
        features -= 1
    tokens = max(0, (bytes_per_head - features * cost.feature) // cost.token)
    sinks = min(SINKS, tokens // 4)
    return features, tokens - sinks, sinks


def even_size(budget: float, cost: HeadCost, share: float = TOKEN_SHARE) -> tuple[int, int, int]:
    """:func:`split` of the bytes of ``budget`` features per KV head; DoflaError if that is less than one, or none."""
    if not isinstance(budget, (int, float)):
        raise DoflaError(f"budget is {budget!r}: give a number of features, as 64")
    if budget < 1:
        raise DoflaError(f"budget {budget} is too small for one feature per layer: give 1 or more")
    return split(round(budget * cost.feature), cost, share)
