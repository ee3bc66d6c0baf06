"""Head budgets: how many bytes of a compressed cache each KV head gets, by what eviction in it costs the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dofla.errors import DoflaError
from dofla.plans.knapsack import lower_hull, spend

RUNG = math.sqrt(2)
"""From one size of a KV head to the next: few heads of a layer then differ, and those of one size are one call."""
LEAST, MOST = 1 / RUNG, 4 * RUNG
"""Bytes of a KV head over those of an even split, by the cost of eviction. With half of it, too many heads that seemed
to need little missed it (``docs/research/cache.md``)."""
READING = 0.3
"""Part of all bytes that goes by a second reading of a text (:mod:`dofla.compression.reading_shares`): with 0.3 facts
are found and text loses no more, with 0.5 it does (``docs/research/cache.md``)."""
LEAST_OF_ALL = (1 - READING) * LEAST
"""The least share of a head."""


@dataclass(frozen=True)
class HeadBudgets:
    """The division of the bytes of a compressed cache among KV heads, by name of the layer."""

    shares: Mapping[str, Sequence[float]] = field(default_factory=dict)  # bytes relative to an even split
    growing: Mapping[str, Sequence[int]] = field(default_factory=dict)  # heads that hold every token, without a share
    held_out: Mapping[str, float] | None = None  # KL on held-out windows, by ways to divide

    @property
    def least(self) -> float:
        """The smallest share."""
        return min((share for own in self.shares.values() for share in own), default=1.0)

    def record(self) -> dict[str, Any]:
        """Their record in a plan."""
        found: dict[str, Any] = {}
        if self.shares:
            found["head_budgets"] = {name: list(own) for name, own in self.shares.items()}
            found |= {"held_out": dict(self.held_out)} if self.held_out else {}
        return found | ({"retrieval_heads": dict(self.growing)} if self.growing else {})

    def divided(
        self, total: float, heads: Mapping[str, int], sizes: Mapping[str, float], most: Mapping[str, float]
    ) -> dict[str, list[float]]:
        """Bytes of each KV head, ``total`` in all; none of those that grow.

        They go by shares of ``sizes``, the bytes of a head of each layer in an even split. No head gets more than
        ``most`` of its layer, and what that leaves goes to the others; where all have that much, the rest to all of
        them. ``heads`` is how many each layer has. DoflaError if others were measured.
        """
        for name, count in heads.items():
            if len(own := self.shares.get(name, [1.0] * count)) != count:
                raise DoflaError(
                    f"layer {name} has {count} KV heads, and was calibrated with {len(own)}: calibrate again"
                )
        wanted = {
            (name, n): self.shares.get(name, [1.0] * count)[n] * sizes[name]
            for name, count in heads.items()
            for n in range(count)
            if n not in self.growing.get(name, ())
        }
        found, left, asked = {name: [0.0] * count for name, count in heads.items()}, total, sum(wanted.values())
        beyond = max(total / sum(most[name] for name, _ in wanted), 1) if wanted else 1
        # Those that are at their most first.
        for (name, n), share in sorted(wanted.items(), key=lambda x: x[1] / most[x[0][0]], reverse=True):
            found[name][n] = min(left * share / asked, beyond * most[name])
            left, asked = left - found[name][n], asked - share
        return found


def divide(sizes: Mapping[str, float], costs: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Shares of KV heads whose bytes are together those of an even split.

    They go from :data:`LEAST` to :data:`MOST` in steps of a :data:`RUNG`. The cost of eviction in a head is taken to be
    inversely proportional to its bytes n, so that the next byte is worth cost / n²: sizes go by the square root of the
    measured cost (:mod:`dofla.compression.eviction_error`), as nearly as the steps allow. ``sizes`` are bytes of a KV
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


def with_reading(
    sizes: Mapping[str, float], shares: Mapping[str, Sequence[float]], reading: Mapping[str, Sequence[float]]
) -> dict[str, list[float]]:
    """Shares by cost, and of :data:`READING` of the bytes those of a second reading; together those of an even split.
    ``sizes`` as for :func:`divide`."""
    total, read = (sum(sizes[name] * sum(own) for name, own in x.items()) for x in (shares, reading))
    part = READING * total / read
    return {
        name: [(1 - READING) * one + part * other for one, other in zip(own, reading[name], strict=True)]
        for name, own in shares.items()
    }


@dataclass(frozen=True)
class _Choice:
    share: float
    bytes: float
    loss: float


_STEPS = [LEAST * RUNG**rung for rung in range(round(math.log(MOST / LEAST, RUNG)) + 1)]
