"""How a memory that fades spends its bytes, where nothing was measured: the newest tokens in eight bits, a few in
four, all others in three, most of which stay as long as they draw attention."""

from __future__ import annotations

from dataclasses import dataclass

from dofla.attention import Stage, stage_bytes
from dofla.errors import DoflaError
from dofla.plans.hybrid import SINKS, HeadCost

FADING = "fading"
"""Name of the strategy, in plans and recipes."""

WINDOW_SHARE, NEAR_SHARE, NEWEST_SHARE = 0.12, 0.16, 0.12
"""Of the bytes, what goes to tokens in eight bits, to those of the first stage, and to those of the second that
are there for their age."""
BITS = (4.0, 3.0)
"""Of the two stages. On SmolLM2 at the bytes of 64 features (``docs/quality.md``)."""


@dataclass(frozen=True)
class Faded:
    """Tokens of one KV head: in eight bits the last and the first ones, and stages in between. The fields are those of
    :class:`dofla.plans.plan.LayerPlan`."""

    window: int
    sinks: int
    stages: list[Stage]
    kept: int
    token_dtype: str = "int8"


def fade_evenly(budget: float, head_dim: int, value_dim: int, cost: HeadCost) -> Faded:
    """At most the bytes of ``budget`` features, in tokens alone.

    Raises:
        DoflaError: sizes of heads that no code fits; a budget too small for a token of each kind.
    """
    if head_dim % 8 or value_dim % 8:
        raise DoflaError(f"heads of {head_dim} and {value_dim} numbers: a fading memory needs multiples of 8")
    total = round(budget * cost.feature)
    near, far = (stage_bytes(head_dim, value_dim, bits, scored=bits == BITS[-1]) for bits in BITS)
    window, first = round(WINDOW_SHARE * total / cost.token), round(NEAR_SHARE * total / near)
    left = (total - (window + SINKS) * cost.token - first * near) // far
    newest = round(NEWEST_SHARE * total / far)
    if min(window, first, newest, left - newest) < 1:
        raise DoflaError(f"budget {budget} is too small for a memory that fades: give more")
    return Faded(window, SINKS, [[first, BITS[0]], [newest, BITS[1]]], left - newest)
