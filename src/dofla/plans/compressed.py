"""Default division of the bytes of a compressed cache, without measurements: the newest tokens in int8, older ones in
three bits, most of which are retained while they draw attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count

from dofla.attention import tier_bytes
from dofla.errors import DoflaError
from dofla.plans.head_budgets import HeadBudgets
from dofla.plans.hybrid import SINKS, HeadCost

COMPRESSED = "compressed"
"""Name of the strategy, in plans and recipes."""

WINDOW_SHARE, NEWEST_SHARE = 0.24, 0.2
"""Fractions of the bytes: tokens in int8, and tokens of the tier that are retained for their age."""
BITS = 3.0
"""Bits per number in the tier. On SmolLM2 at the bytes of 64 features (``docs/research/cache.md``)."""


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of one KV head: the last and the first ones in int8, and a tier of others. The fields are those of
    :class:`dofla.plans.plan.LayerPlan`."""

    window: int
    sinks: int
    tiers: list[list[float]]
    heavy_hitters: int
    token_dtype: str = "int8"
    smooth_keys: bool = True


class TooSmall(DoflaError):
    """A budget without room for a token of each kind."""


PER_HEAD = ("window", "sinks", "tiers", "heavy_hitters")
"""Fields of which KV heads may have their own."""


def even_counts(budget: float, head_dim: int, value_dim: int, cost: HeadCost, most: int | None = None) -> TokenCounts:
    """Tokens of a KV head that take at most the bytes of ``budget`` features. No text has more than ``most`` tokens:
    bytes beyond those of so many go to int8.

    Raises:
        TooSmall: a budget without room for a token of each kind.
        DoflaError: head sizes that no code fits.
    """
    if head_dim % 8 or value_dim % 8:
        raise DoflaError(f"heads of {head_dim} and {value_dim} numbers: a compressed cache needs multiples of 8")
    total, coded = round(budget * cost.feature), tier_bytes(head_dim, value_dim, BITS, scored=True)
    window, newest, heavy_hitters = _split(total, cost.token, coded)
    if min(window, newest, heavy_hitters) < 1:
        raise TooSmall(f"budget {budget} is too small for a token of each kind: give more")
    if most is not None and window + SINKS + newest + heavy_hitters > most:
        held = max(most - SINKS, 3)
        window = min((total - SINKS * cost.token - held * coded) // (cost.token - coded), held - 2)
        newest = max(1, round(NEWEST_SHARE / (1 - WINDOW_SHARE) * (held - window)))
        heavy_hitters = held - window - newest
    return TokenCounts(window, SINKS, [[newest, BITS]], heavy_hitters)


def _split(total: int, token: int, coded: int) -> tuple[int, int, int]:
    """Tokens of the local window, and newest and retained ones of the tier, in so many bytes."""
    window, newest = round(WINDOW_SHARE * total / token), round(NEWEST_SHARE * total / coded)
    return window, newest, (total - (window + SINKS) * token) // coded - newest


def smallest_budget(head_dim: int, value_dim: int, cost: HeadCost) -> int:
    """The smallest integer that :func:`even_counts` takes."""
    coded = tier_bytes(head_dim, value_dim, BITS, scored=True)
    return next(n for n in count(1) if min(_split(n * cost.feature, cost.token, coded)) >= 1)


def budget_for(tokens: int, head_dim: int, value_dim: int, cost: HeadCost) -> int:
    """The smallest budget with which :func:`even_counts` has slots for so many tokens, but for what it rounds."""
    coded = tier_bytes(head_dim, value_dim, BITS, scored=True)
    per_byte = WINDOW_SHARE / cost.token + (1 - WINDOW_SHARE) / coded
    return math.ceil((tokens + SINKS * (cost.token / coded - 1)) / per_byte / cost.feature)


def fillable(
    head_budgets: HeadBudgets, budget: float, positions: int, layers: Mapping[str, tuple[int, int, HeadCost]]
) -> HeadBudgets:
    """Head budgets of which none is more than so many positions can fill (:meth:`HeadBudgets.at_most`).

    Args:
        head_budgets: as measured.
        budget: in features per KV head, the mean over heads, above 0.
        positions: of the model, or the context that is calibrated for.
        layers: by name, sizes of a KV head's keys and values, and its costs.
    """
    most = {name: budget_for(positions, *own) / budget for name, own in layers.items()}
    return head_budgets.at_most(most, {name: cost.feature for name, (_, _, cost) in layers.items()})
