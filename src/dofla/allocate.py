"""Allocate: from a Profile and a budget to a Plan (arXiv 2507.03340, section 3, Algorithm 1).

The budget is in features per KV head, averaged over the layers, as in the paper; what is compared is state bytes, so
a window and sinks, which cost bytes as well, are paid for out of the same budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

from dofla.errors import DoflaError
from dofla.feature_maps import feature_map_class
from dofla.plan import LayerPlan, Plan, is_whole
from dofla.profile import LayerProfile, Profile
from dofla.spectrum import DEFAULT_LAMBDA, check_lambda

Strategy = Callable[[Sequence[LayerProfile], Sequence[float], Fraction], list[Fraction]]
"""(layers, degrees of freedom of each layer, features per layer on average) → features wished for in each layer."""


def fixed(layers: Sequence[LayerProfile], dof: Sequence[float], average: Fraction) -> list[Fraction]:
    """The same number everywhere."""
    return [Fraction(math.floor(average))] * len(layers)


def proportional_to_dof(layers: Sequence[LayerProfile], dof: Sequence[float], average: Fraction) -> list[Fraction]:
    """Algorithm 1: in proportion to the degrees of freedom, at the cost of ``average`` features everywhere."""
    shares, costs = [Fraction(n) for n in dof], _costs(layers)
    cost = sum(share * cost for share, cost in zip(shares, costs, strict=True))
    return [average * sum(costs) * share / cost for share in shares]


def clipped_dof(layers: Sequence[LayerProfile], dof: Sequence[float], average: Fraction) -> list[Fraction]:
    """Algorithm 1, no layer above its head size (DoF + Clip); what is cut off is not spent elsewhere."""
    wished = proportional_to_dof(layers, dof, average)
    return [min(share, Fraction(layer.head_dim)) for share, layer in zip(wished, layers, strict=True)]


STRATEGIES: dict[str, Strategy] = {
    "fixed": fixed,
    "dof": proportional_to_dof,
    "dof_clip": clipped_dof,
}

OVER_HEADS: dict[str, Callable[[Sequence[float]], float]] = {
    "max": max,
    "mean": lambda values: sum(values) / len(values),
}


def allocate(
    profile: Profile,
    budget: int = 64,
    strategy: str = "dof",
    feature_map: str = "prf",
    *,
    lam: float = DEFAULT_LAMBDA,
    over_heads: str = "max",
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
        over_heads: how a layer's number comes from its heads': ``max`` (paper) or ``mean``.
        normalization: of the Gram matrices; default the profile's.
        window, sinks: exact tokens per layer, paid for out of the budget.
        keep_softmax: names of layers to leave as they are.

    Returns:
        A plan whose state is never larger than the budget's, and in which every layer has at least one feature.

    Raises:
        DoflaError: unknown strategy, feature map, normalisation or layer; λ ≤ 0; a budget too small for one feature
            per layer.
    """
    check_lambda(lam)
    _check_choice("strategy", strategy, STRATEGIES)
    _check_choice("over_heads", over_heads, OVER_HEADS)
    feature_map_class(feature_map)
    for what, number in (("budget", budget), ("window", window), ("sinks", sinks)):
        if not is_whole(number) or number < 0:
            raise DoflaError(f"{what} is {number!r}: give a whole number, 0 or more")
    names = [layer.name for layer in (*profile.layers, *profile.skipped)]
    for name in keep_softmax:
        if name not in names:
            raise DoflaError(f"keep_softmax names {name!r}, which is no layer of this profile: it has {names[0]}, ...")
    pairs = [
        (layer, OVER_HEADS[over_heads](row))
        for layer, row in zip(profile.layers, profile.dof(lam, normalization), strict=True)
        if layer.name not in keep_softmax
    ]
    counts: dict[str, int] = {}
    if pairs:
        layers, dof = zip(*pairs, strict=True)
        average = _features_left(layers, budget, window, sinks)
        wished = STRATEGIES[strategy](layers, dof, average)
        counts = dict(zip([x.name for x in layers], _round(layers, wished, average), strict=True))
    plans = [
        LayerPlan(x.name, x.kv_heads, x.head_dim, x.value_dim, counts[x.name], window, sinks, feature_map)
        if x.name in counts
        else LayerPlan(x.name, x.kv_heads, x.head_dim, x.value_dim, keep_softmax=True)
        for x in (*profile.layers, *profile.skipped)
    ]
    made_by = {"strategy": strategy, "budget": budget, "lambda": lam, "over_heads": over_heads}
    made_by["normalization"] = normalization or profile.normalization
    return Plan(plans, profile.model, made_by)


def _features_left(layers: Sequence[LayerProfile], budget: int, window: int, sinks: int) -> Fraction:
    """Average number of features once window and sinks are paid for."""
    numbers = budget * sum(_costs(layers))
    numbers -= sum((window + sinks) * x.kv_heads * (x.head_dim + x.value_dim) for x in layers)
    average = Fraction(numbers, sum(_costs(layers)))
    if average < 1:
        exact = f" after a window of {window} and {sinks} sinks" if window or sinks else ""
        raise DoflaError(
            f"budget {budget} is too small for one feature per layer{exact}: it leaves {float(average):.2f} on average"
        )
    return average


def _costs(layers: Sequence[LayerProfile]) -> list[int]:
    """Numbers of state that one more feature per KV head costs in each layer."""
    return [x.kv_heads * (x.value_dim + 2) for x in layers]


def _round(layers: Sequence[LayerProfile], wished: Sequence[Fraction], average: Fraction) -> list[int]:
    """Whole numbers near the wished ones, at least 1 each, of no more total cost than ``average`` everywhere."""
    costs = _costs(layers)
    counts = [max(1, int(share)) for share in wished]
    spare = average * sum(costs) - sum(cost * count for cost, count in zip(costs, counts, strict=True))
    # Layers lifted to 1 may have used more than there is: take it back where a feature is the smallest loss.
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


def _check_choice(what: str, value: str, known: dict) -> None:
    if value not in known:
        raise DoflaError(f"unknown {what} {value!r}: choose one of {', '.join(sorted(known))}")
