"""Head budgets: how many bytes of a compressed cache each KV head gets, by what eviction in it costs the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dofla.errors import DoflaError
from dofla.plans.knapsack import lower_hull, spend

RUNG = math.sqrt(2)
"""From one size of a KV head to the next: few heads of a layer then differ, and those of one size are one call."""
LEAST, MOST = 1 / RUNG, 4 * RUNG
"""Bytes of a KV head over those of an even split. With half of it, too many heads that seemed to need little missed it
(``docs/research/cache.md``)."""

MAX_FULL_FRACTION = 0.5
"""Fraction of all bytes that retrieval heads may take: the others do worse with what is left to them."""
_EXACT = 1e-9
"""So that a third of 96 is 32."""


@dataclass(frozen=True)
class HeadBudgets:
    """The division of the bytes of a compressed cache among KV heads, by name of the layer. Full heads hold every token
    whatever their share: retrieval heads."""

    shares: Mapping[str, Sequence[float]]  # of each KV head, bytes relative to an even split
    full_heads: Mapping[str, Sequence[int]] = field(default_factory=dict)
    held_out: Mapping[str, float] | None = None  # KL on held-out windows, of "measured" budgets and of "even" ones

    @property
    def least(self) -> float:
        """The smallest share."""
        return min(share for own in self.shares.values() for share in own)

    def of_layer(self, name: str, heads: int) -> Sequence[float]:
        """The shares of a layer with so many KV heads; DoflaError if others were measured."""
        own = self.shares.get(name, [1.0] * heads)
        if len(own) != heads:
            raise DoflaError(f"layer {name} has {heads} KV heads, and was calibrated with {len(own)}: calibrate again")
        return own

    def record(self) -> dict[str, Any]:
        """Their record in a plan."""
        found: dict[str, Any] = {"head_budgets": {name: list(own) for name, own in self.shares.items()}}
        found |= {"held_out": dict(self.held_out)} if self.held_out else {}
        return found | ({"retrieval_heads": dict(self.full_heads)} if self.full_heads else {})

    def at_most(self, most: Mapping[str, float], sizes: Mapping[str, float]) -> HeadBudgets:
        """Head budgets of which none is above ``most`` of its layer, and those of full heads are at it. What that
        leaves goes to all others, in proportion to what they have. Where all have that much, the rest goes to them in
        proportion to it. ``sizes`` are bytes of a KV head of each layer in an even split. DoflaError if full heads
        would take more than :data:`MAX_FULL_FRACTION` of the bytes."""
        found = {name: list(own) for name, own in self.shares.items()}
        heads = [(share / most[name], name, n) for name in sizes for n, share in enumerate(found.get(name, ()))]
        full_heads = {(name, n) for name in sizes for n in self.full_heads.get(name, ())}
        left = wanted = sum(found[name][n] * sizes[name] for _, name, n in heads)
        beyond = max(left / sum(most[name] * sizes[name] for _, name, _ in heads), 1) if heads else 1
        if sum(most[name] * sizes[name] for name, _ in full_heads) > MAX_FULL_FRACTION * left * (1 + _EXACT):
            raise DoflaError(
                f"{len(full_heads)} retrieval heads would take more than {MAX_FULL_FRACTION:.0%} of the bytes: give a "
                "larger size, fewer of them, or a shorter context"
            )
        # Those that are at their most first.
        for _, name, n in sorted(heads, key=lambda x: (x[1:] in full_heads, x), reverse=True):
            share, bound = found[name][n], beyond * most[name]
            found[name][n] = left / wanted * share
            if found[name][n] > bound or (name, n) in full_heads:
                found[name][n] = bound
                left, wanted = left - bound * sizes[name], wanted - share * sizes[name]
        return replace(self, shares=found)


def divide(sizes: Mapping[str, float], costs: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Shares of KV heads whose bytes are together those of an even split.

    They go from :data:`LEAST` to :data:`MOST` in steps of a :data:`RUNG`. The cost of eviction in a head is taken to be
    inversely proportional to its bytes n, so that the next byte is worth cost / n²: sizes go by the square root of the
    measured cost (:mod:`dofla.compression.eviction_cost`), as nearly as the steps allow. ``sizes`` are bytes of a KV
    head of each layer in an even split."""
    choices = {
        (name, head): lower_hull([_Choice(share, share * sizes[name], cost / share) for share in _STEPS])
        for name, own in costs.items()
        for head, cost in enumerate(own)
    }
    total = sum(sizes[name] for name, _ in choices)
    chosen = spend(choices, total)
    spare = total / sum(choice.bytes for choice in chosen.values())  # too little for another step
    return {name: [spare * chosen[name, head].share for head in range(len(own))] for name, own in costs.items()}


@dataclass(frozen=True)
class _Choice:
    share: float
    bytes: float
    loss: float


_STEPS = [LEAST * RUNG**rung for rung in range(round(math.log(MOST / LEAST, RUNG)) + 1)]
