"""How a memory that fades spends its bytes, where nothing was measured: the newest tokens in eight bits, all others in
three, most of which stay as long as they draw attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dofla.attention import Stage, stage_bytes
from dofla.errors import DoflaError
from dofla.plans.hybrid import SINKS, HeadCost
from dofla.plans.shares import Shares

FADING = "fading"
"""Name of the strategy, in plans and recipes."""

WINDOW_SHARE, NEWEST_SHARE = 0.24, 0.2
"""Of the bytes, what goes to tokens in eight bits, and to those of the stage that are there for their age."""
BITS = 3.0
"""Of the stage. On SmolLM2 at the bytes of 64 features (``docs/quality/fading.md``)."""


@dataclass(frozen=True)
class Faded:
    """Tokens of one KV head: in eight bits the last and the first ones, and a stage of others. The fields are those of
    :class:`dofla.plans.plan.LayerPlan`."""

    window: int
    sinks: int
    stages: list[Stage]
    kept: int
    token_dtype: str = "int8"
    smooth_keys: bool = True


PER_HEAD = ("window", "sinks", "stages", "kept")
"""Fields of which KV heads may have their own."""


def fade_evenly(budget: float, head_dim: int, value_dim: int, cost: HeadCost, most: int | None = None) -> Faded:
    """At most the bytes of ``budget`` features, in tokens alone, of which there will never be more than ``most``: bytes
    beyond those of so many are for eight bits.

    Raises:
        DoflaError: sizes of heads that no code fits; a budget too small for a token of each kind.
    """
    if head_dim % 8 or value_dim % 8:
        raise DoflaError(f"heads of {head_dim} and {value_dim} numbers: a fading memory needs multiples of 8")
    total = round(budget * cost.feature)
    coded = stage_bytes(head_dim, value_dim, BITS, scored=True)
    window, newest = round(WINDOW_SHARE * total / cost.token), round(NEWEST_SHARE * total / coded)
    kept = (total - (window + SINKS) * cost.token) // coded - newest
    if min(window, newest, kept) < 1:
        raise DoflaError(f"budget {budget} is too small for a memory that fades: give more")
    if most is not None and window + SINKS + newest + kept > most:
        held = max(most - SINKS, 3)
        window = min((total - SINKS * cost.token - held * coded) // (cost.token - coded), held - 2)
        newest = max(1, round(NEWEST_SHARE / (1 - WINDOW_SHARE) * (held - window)))
        kept = held - window - newest
    return Faded(window, SINKS, [[newest, BITS]], kept)


def budget_for(tokens: int, head_dim: int, value_dim: int, cost: HeadCost) -> int:
    """The least with which :func:`fade_evenly` has places for so many tokens, but for what it rounds."""
    coded = stage_bytes(head_dim, value_dim, BITS, scored=True)
    per_byte = WINDOW_SHARE / cost.token + (1 - WINDOW_SHARE) / coded
    return math.ceil((tokens + SINKS * (cost.token / coded - 1)) / per_byte / cost.feature)


def fillable(shares: Shares, budget: float, positions: int, layers: Mapping[str, tuple[int, int, HeadCost]]) -> Shares:
    """Shares of which no KV head gets more than so many positions can fill (:meth:`Shares.at_most`).

    Args:
        shares: as measured.
        budget: that they are of, above 0.
        positions: of the model, or as many of them as will be read.
        layers: by name, sizes of a KV head's keys and values, and what it costs.
    """
    most = {name: budget_for(positions, *own) / budget for name, own in layers.items()}
    return shares.at_most(most, {name: cost.feature for name, (_, _, cost) in layers.items()})
