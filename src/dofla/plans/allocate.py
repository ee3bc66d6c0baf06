"""Allocate: from a Profile and a budget to a Plan.

The budget is in features per KV head, averaged over the layers, as in arXiv 2507.03340 (section 3, Algorithm 1); what
is compared is state bytes, so a window and sinks, which cost bytes as well, are paid for out of the same budget.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from dofla.errors import DoflaError, check_choice, is_integer
from dofla.feature_maps import feature_map_class
from dofla.feature_maps.cost import TOKEN_DTYPES, HeadCost
from dofla.plans.curves import Curves, Shape, Size, choose
from dofla.plans.hybrid import FEATURE_MAP, default_token_dtype, even_size
from dofla.plans.layers import FeatureLayer, LayerPlan, SoftmaxLayer, alike
from dofla.plans.plan import Plan
from dofla.profiles.profile import LayerProfile, Profile, SkippedLayer
from dofla.profiles.tolerance import DEFAULT_LAMBDA, check_lambda


@dataclass(frozen=True)
class Unit:
    """A layer or a KV head, which gets a number of features of its own: its degrees of freedom, the numbers of state
    that one more feature takes in it, and the size of its queries and keys."""

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


STRATEGIES: dict[str, Strategy] = {"fixed": fixed, "dof": proportional_to_dof, "dof_clip": clipped_dof}


def over_heads_function(name: str) -> Callable[[Sequence[float]], float]:
    """The function from the numbers of a layer's heads to that of the layer, by name: ``max``, ``mean``, or a quantile
    in percent such as ``q50`` or ``q90``; DoflaError for any other."""
    if name == "max":
        return max
    if name == "mean":
        return lambda values: sum(values) / len(values)
    if name[:1] == "q" and name[1:].isdecimal() and int(name[1:]) <= 100:
        return lambda values: torch.tensor(values, dtype=torch.float64).quantile(int(name[1:]) / 100).item()
    raise DoflaError(f"unknown over_heads {name!r}: choose max, mean, or a quantile in percent such as q75")


HYBRID = ("hybrid", "measured")
"""Strategies that spend bytes on a window and sinks as well: the same everywhere, or by measured error curves."""


def allocate(
    profile: Profile,
    budget: int = 64,
    strategy: str = "hybrid",
    feature_map: str | None = None,
    *,
    curves: Curves | None = None,
    context: int | None = None,
    lam: float = DEFAULT_LAMBDA,
    over_heads: str = "max",
    per_head: bool | None = None,
    normalization: str | None = None,
    window: int | None = None,
    sinks: int | None = None,
    token_dtype: str | None = None,
    keep_softmax: Sequence[str] = (),
) -> Plan:
    """Give each layer its state.

    Args:
        profile: of the model.
        budget: the bytes of so many features per KV head, averaged over the layers that are linearized.
        strategy: ``hybrid``, a window, sinks and features in every layer alike; ``measured``, of each what the error
            curves say; or one of the paper's, a name in :data:`STRATEGIES`.
        feature_map: a name in :data:`dofla.feature_maps.FEATURE_MAPS`; default that of the curves, ``mlp`` for hybrid
            layers, ``prf`` for the paper's.
        curves: for ``measured``, from :func:`dofla.linear.measure_curves`.
        context: for ``measured``: layers may stay softmax where their cache at so many tokens is worth its bytes.
        lam: tolerance λ of the degrees of freedom; only its size relative to the spectra matters.
        over_heads: how a layer's number comes from its heads': ``max`` (paper), ``mean``, or a quantile in percent,
            such as ``q75``.
        per_head: give each KV head a size of its own, by its own degrees of freedom or error curve; default: with
            ``measured`` yes, with the paper's strategies no. Not for ``hybrid``.
        normalization: of the Gram matrices; default the profile's.
        window, sinks: exact tokens per layer, paid for out of the budget; default: none with the paper's strategies,
            what :func:`dofla.plans.hybrid.split` finds for ``hybrid``. Not for ``measured``.
        token_dtype: how exact tokens are kept, a name in :data:`dofla.feature_maps.cost.TOKEN_DTYPES`; default that of
            the curves, ``int8`` for hybrid layers (an encoder's: ``model``), ``model`` for the paper's.
        keep_softmax: names of layers to leave as they are.

    Returns:
        A plan whose state is never larger than the budget's, and in which every KV head has at least one feature.

    Raises:
        DoflaError: unknown strategy, feature map, normalization, token_dtype or layer; λ ≤ 0; a budget too small for
            one feature per layer; ``measured`` without curves, or with those of another model or token_dtype; curves or
            context with another strategy.
    """
    check_lambda(lam)
    check_choice("strategy", strategy, sorted([*STRATEGIES, *HYBRID]))
    summary = over_heads_function(over_heads)
    if strategy != "measured" and (curves is not None or context is not None):
        what = "curves" if curves is not None else "context"
        raise DoflaError(
            f"{what} given with strategy {strategy}: only measured goes by them; leave them out, or take it"
        )
    if per_head and strategy == "hybrid":
        raise DoflaError("per_head given with strategy hybrid, which has one size for all: leave it out, or measure")
    per_head = strategy == "measured" if per_head is None else per_head
    measured = curves.made_by if curves is not None else {}
    feature_map = feature_map or measured.get("feature_map") or (FEATURE_MAP if strategy in HYBRID else "prf")
    feature_map_class(feature_map)
    if token_dtype is not None:
        check_choice("token_dtype", token_dtype, TOKEN_DTYPES)
    if curves is not None and token_dtype not in (None, kept := measured.get("token_dtype", "model")):
        raise DoflaError(f"token_dtype is {token_dtype!r}, the error curves were measured with {kept!r}: measure them")
    for what, number in (("budget", budget), ("window", window or 0), ("sinks", sinks or 0)):
        if not is_integer(number) or number < 0:
            raise DoflaError(f"{what} is {number!r}: give an integer, 0 or more")
    if context is not None and (not is_integer(context) or context < 1):
        raise DoflaError(f"context is {context!r}: give an integer number of tokens, 1 or more")
    names = [x.name for x in profile.layers] + [x.name for x in profile.skipped]
    for name in keep_softmax:
        if name not in names:
            raise DoflaError(f"keep_softmax names {name!r}, which is no layer of this profile: it has {names[0]}, ...")
    dof = profile.dof(lam, normalization)
    rows = {x.name: row for x, row in zip(profile.layers, dof, strict=True) if x.name not in keep_softmax}
    chosen = [layer for layer in profile.layers if layer.name in rows]
    if curves is not None or strategy not in HYBRID:
        token_dtype = token_dtype or measured.get("token_dtype", "model")
    kept_as = {x.name: token_dtype or default_token_dtype(x.causal) for x in chosen}
    costs = {x.name: HeadCost.of(x.head_dim, x.value_dim, profile.itemsize, kept_as[x.name]) for x in chosen}
    shapes = {x.name: Shape(x.kv_heads, costs[x.name]) for x in chosen}
    if strategy == "measured":
        sizes = _measured(shapes, budget, curves, per_head, context, window, sinks)
    elif strategy == "hybrid" and window is None and sinks is None:
        sizes = {x.name: [even_size(budget, costs[x.name])] * x.kv_heads for x in chosen}
    else:
        exact = (window or 0, sinks or 0)
        counts = _counts(chosen, shapes, rows, STRATEGIES.get(strategy, fixed), summary, per_head, budget, *exact)
        sizes = {name: [(count, *exact) for count in own] for name, own in counts.items()}
    plans = [_layer(x, sizes.get(x.name), feature_map, kept_as.get(x.name, "model")) for x in profile.layers]
    plans += [_layer(x, None, feature_map, "model") for x in profile.skipped]
    made_by: dict[str, object] = {"strategy": strategy, "budget": budget}
    if strategy in STRATEGIES:
        made_by |= {"lambda": lam, "over_heads": over_heads, "per_head": per_head}
        made_by |= {"normalization": normalization or profile.normalization}
    if strategy == "measured":
        made_by |= {"per_head": per_head, "context": context}
    return Plan(plans, profile.model, made_by)


def _layer(x: LayerProfile | SkippedLayer, sizes: Sequence[Size] | None, feature_map: str, kept_as: str) -> LayerPlan:
    """A layer with these sizes of its KV heads, one number where they agree; softmax without any."""
    shape = (x.name, x.kv_heads, x.head_dim, x.value_dim)
    if sizes is None:
        return SoftmaxLayer(*shape)
    features, window, sinks = (alike(each) for each in zip(*sizes, strict=True))
    return FeatureLayer(*shape, features, window, sinks, feature_map, kept_as, smooth_keys=kept_as == "int8")


def _measured(
    shapes: Mapping[str, Shape],
    budget: int,
    curves: Curves | None,
    per_head: bool,
    context: int | None,
    window: int | None,
    sinks: int | None,
) -> dict[str, list[Size] | None]:
    if curves is None:
        raise DoflaError(
            "strategy measured goes by error curves: give curves=dofla.linear.measure_curves(model, tokens)"
        )
    if window is not None or sinks is not None:
        raise DoflaError("strategy measured chooses window and sinks itself: leave them out, or take strategy hybrid")
    by_name = {curve.name: curve for curve in curves.layers}
    missing = [name for name in shapes if name not in by_name]
    if missing:
        raise DoflaError(f"the error curves say nothing of layer {missing[0]}: they are of another model; measure them")
    for name, shape in shapes.items():
        if (heads := len(by_name[name].effects)) != shape.kv_heads:
            raise DoflaError(
                f"the error curves of layer {name} are of {heads} KV heads, not {shape.kv_heads}: "
                "they are of another model; measure them"
            )
    total = budget * sum(shape.kv_heads * shape.cost.feature for shape in shapes.values())
    choices = choose([by_name[name] for name in shapes], shapes, total, context, per_head=per_head)
    return {name: choice.sizes for name, choice in choices.items()}


def _counts(
    layers: Sequence[LayerProfile],
    shapes: Mapping[str, Shape],
    dof: Mapping[str, Sequence[float]],
    strategy: Strategy,
    summary: Callable[[Sequence[float]], float],
    per_head: bool,
    budget: int,
    window: int,
    sinks: int,
) -> dict[str, list[int]]:
    """Features of each KV head of each layer, once window and sinks are paid for."""
    if not layers:
        return {}
    units: list[Unit] = []
    for x in layers:
        cost = x.value_dim + 2
        if per_head:
            units += [Unit(own, cost, x.head_dim) for own in dof[x.name]]
        else:
            units.append(Unit(summary(dof[x.name]), cost * x.kv_heads, x.head_dim))
    average = _features_left(list(shapes.values()), budget, window, sinks)
    each = iter(_round(units, strategy(units, average), average))
    return {x.name: [next(each) for _ in x.spectra] if per_head else [next(each)] * x.kv_heads for x in layers}


def _features_left(shapes: Sequence[Shape], budget: int, window: int, sinks: int) -> Fraction:
    """Average number of features once window and sinks are paid for."""
    cost = sum(x.kv_heads * x.cost.feature for x in shapes)
    exact = sum((window + sinks) * x.kv_heads * x.cost.token for x in shapes)
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
