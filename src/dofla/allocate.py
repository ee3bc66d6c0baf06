"""Allocate: from a Profile and a budget to a Plan (arXiv 2507.03340, section 3, Algorithm 1).

The budget is in features per KV head, averaged over the layers, as in the paper; what is compared is state bytes, so
a window and sinks, which cost bytes as well, are paid for out of the same budget.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from dofla.errors import DoflaError
from dofla.feature_maps import feature_map_class
from dofla.plan import LayerPlan, Plan, is_whole
from dofla.profile import LayerProfile, Profile
from dofla.spectrum import DEFAULT_LAMBDA, check_lambda


@dataclass(frozen=True)
class Unit:
    """What gets a number of features of its own: a layer, or a KV head.

    Attributes:
        dof: its degrees of freedom.
        cost: numbers of state that one more feature takes in it.
        head_dim: size of its queries and keys.
    """

    dof: float
    cost: int
    head_dim: int


Strategy = Callable[[Sequence[Unit], Fraction], list[Fraction]]
"""(units, features per KV head on average) → features wished for in each unit."""


def fixed(units: Sequence[Unit], average: Fraction) -> list[Fraction]:
    """The same number everywhere."""
    return [Fraction(math.floor(average))] * len(units)


def proportional_to_dof(units: Sequence[Unit], average: Fraction) -> list[Fraction]:
    """Algorithm 1: in proportion to the degrees of freedom, at the cost of ``average`` features everywhere."""
    shares = [Fraction(unit.dof) for unit in units]
    cost = sum(share * unit.cost for share, unit in zip(shares, units, strict=True))
    return [average * sum(unit.cost for unit in units) * share / cost for share in shares]


def clipped_dof(units: Sequence[Unit], average: Fraction) -> list[Fraction]:
    """Algorithm 1, nothing above the head size (DoF + Clip); what is cut off is not spent elsewhere."""
    wished = proportional_to_dof(units, average)
    return [min(share, Fraction(unit.head_dim)) for share, unit in zip(wished, units, strict=True)]


STRATEGIES: dict[str, Strategy] = {
    "fixed": fixed,
    "dof": proportional_to_dof,
    "dof_clip": clipped_dof,
}


def over_heads_function(name: str) -> Callable[[Sequence[float]], float]:
    """How a layer's number comes from its heads': ``max``, ``mean``, or a quantile in percent, ``q50`` or ``q90``.

    Raises:
        DoflaError: for any other name.
    """
    if name == "max":
        return max
    if name == "mean":
        return lambda values: sum(values) / len(values)
    if name[:1] == "q" and name[1:].isdecimal() and int(name[1:]) <= 100:
        return lambda values: torch.tensor(values, dtype=torch.float64).quantile(int(name[1:]) / 100).item()
    raise DoflaError(f"unknown over_heads {name!r}: choose max, mean, or a quantile in percent such as q75")


def allocate(
    profile: Profile,
    budget: int = 64,
    strategy: str = "dof",
    feature_map: str = "prf",
    *,
    lam: float = DEFAULT_LAMBDA,
    over_heads: str = "max",
    per_head: bool = False,
    normalization: str | None = None,
    window: int = 0,
    sinks: int = 0,
    keep_softmax: Sequence[str] = (),
) -> Plan:
    """Give each layer its number of features.

    Args:
        profile: of the teacher.
        budget: features per KV head, averaged over the layers that are linearised.
        strategy: a name in :data:`STRATEGIES`.
        feature_map: a name in :data:`dofla.feature_maps.FEATURE_MAPS`.
        lam: tolerance λ of the degrees of freedom; only its size relative to the spectra matters.
        over_heads: how a layer's number comes from its heads': ``max`` (paper), ``mean``, or a quantile in percent,
            such as ``q75``.
        per_head: give each KV head a number of its own instead, by its own degrees of freedom.
        normalization: of the Gram matrices; default the profile's.
        window, sinks: exact tokens per layer, paid for out of the budget.
        keep_softmax: names of layers to leave as they are.

    Returns:
        A plan whose state is never larger than the budget's, and in which every KV head has at least one feature.

    Raises:
        DoflaError: unknown strategy, feature map, normalisation or layer; λ ≤ 0; a budget too small for one feature
            per layer.
    """
    check_lambda(lam)
    if strategy not in STRATEGIES:
        raise DoflaError(f"unknown strategy {strategy!r}: choose one of {', '.join(sorted(STRATEGIES))}")
    summary = over_heads_function(over_heads)
    feature_map_class(feature_map)
    for what, number in (("budget", budget), ("window", window), ("sinks", sinks)):
        if not is_whole(number) or number < 0:
            raise DoflaError(f"{what} is {number!r}: give a whole number, 0 or more")
    names = [layer.name for layer in (*profile.layers, *profile.skipped)]
    for name in keep_softmax:
        if name not in names:
            raise DoflaError(f"keep_softmax names {name!r}, which is no layer of this profile: it has {names[0]}, ...")
    rows = zip(profile.layers, profile.dof(lam, normalization), strict=True)
    chosen = {layer.name: (layer, row) for layer, row in rows if layer.name not in keep_softmax}
    counts: dict[str, int | list[int]] = {}
    if chosen:
        numbers = {
            name: [_unit(layer, [dof]) for dof in row] if per_head else [_unit(layer, row, summary)]
            for name, (layer, row) in chosen.items()
        }
        units = list(itertools.chain(*numbers.values()))
        average = _features_left([layer for layer, _ in chosen.values()], budget, window, sinks)
        each = iter(_round(units, STRATEGIES[strategy](units, average), average))
        for name, own in numbers.items():
            given = [next(each) for _ in own]
            counts[name] = given if len(set(given)) > 1 else given[0]
    plans = [
        LayerPlan(x.name, x.kv_heads, x.head_dim, x.value_dim, counts[x.name], window, sinks, feature_map)
        if x.name in counts
        else LayerPlan(x.name, x.kv_heads, x.head_dim, x.value_dim, keep_softmax=True)
        for x in (*profile.layers, *profile.skipped)
    ]
    made_by = {"strategy": strategy, "budget": budget, "lambda": lam, "over_heads": over_heads}
    made_by |= {"per_head": per_head, "normalization": normalization or profile.normalization}
    return Plan(plans, profile.model, made_by)


def _unit(layer: LayerProfile, dof: Sequence[float], summary: Callable[[Sequence[float]], float] | None = None) -> Unit:
    """A layer, whose number comes from its heads' by ``summary``; or, without it, one head of it."""
    cost = layer.value_dim + 2
    if summary is None:
        return Unit(dof[0], cost, layer.head_dim)
    return Unit(summary(dof), cost * layer.kv_heads, layer.head_dim)


def _features_left(layers: Sequence[LayerProfile], budget: int, window: int, sinks: int) -> Fraction:
    """Average number of features once window and sinks are paid for."""
    cost = sum(x.kv_heads * (x.value_dim + 2) for x in layers)
    exact = sum((window + sinks) * x.kv_heads * (x.head_dim + x.value_dim) for x in layers)
    average = Fraction(budget * cost - exact, cost)
    if average < 1:
        after = f" after a window of {window} and {sinks} sinks" if window or sinks else ""
        raise DoflaError(
            f"budget {budget} is too small for one feature per layer{after}: it leaves {float(average):.2f} on average"
        )
    return average


def _round(units: Sequence[Unit], wished: Sequence[Fraction], average: Fraction) -> list[int]:
    """Whole numbers near the wished ones, at least 1 each, of no more total cost than ``average`` everywhere."""
    costs = [unit.cost for unit in units]
    counts = [max(1, int(share)) for share in wished]
    spare = average * sum(costs) - sum(cost * count for cost, count in zip(costs, counts, strict=True))
    # Units lifted to 1 may have used more than there is: take it back where a feature is the smallest loss.
    while spare < 0:
        n = max(range(len(counts)), key=lambda n: (counts[n] > 1, counts[n] / wished[n]))
        counts[n] -= 1
        spare += costs[n]
    # Largest remainders first, but never above the next whole number: a strategy may wish for less than there is.
    for n in sorted(range(len(counts)), key=lambda n: (counts[n] - wished[n], n)):
        if counts[n] < wished[n] and costs[n] <= spare:
            counts[n] += 1
            spare -= costs[n]
    return counts
