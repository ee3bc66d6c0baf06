"""Tables from which the page's sliders make a plan: everything that Python knows better than a browser."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dofla.errors import DoflaError
from dofla.plans.compressed import budget_for, even_counts
from dofla.plans.curves import Curves, Shape, best_sizes
from dofla.plans.hybrid import TOKEN_DTYPES, HeadCost, default_token_dtype, even_size
from dofla.plans.plan import LayerPlan
from dofla.profiles.profile import LayerProfile, Profile

LAMBDAS = tuple(float(f"{digits}e{power}") for power in range(-5, 0) for digits in (1, 1.5, 2, 3, 5, 7))
"""Tolerances that the slider stops at, beside the recipe's own."""

_BUDGETS = (128, 512)
"""The slider goes up to four times the recipe's budget, within these."""


def slider_tables(
    profile: Profile,
    curves: Mapping[str, Curves],
    *,
    budget: int,
    lam: float,
    largest_share: float = 1.0,
    contexts: Sequence[int | None] = (),
    full_heads: bool = False,
) -> dict[str, Any]:
    """What strategies need to know of a teacher, so that a plan is a matter of whole numbers and comparisons.

    Args:
        profile: of the teacher.
        curves: by the file they stand in; those that do not know all layers are left out.
        budget, lam: where the sliders start.
        largest_share: that any KV head has (:class:`dofla.HeadBudgets`).
        contexts: of such caches, beside all positions of the model.
        full_heads: whether KV heads of one of them hold every token.

    Returns:
        ``layers`` with the bytes that a feature and a token cost per KV head, by how tokens are kept; ``skipped``;
        ``lambdas``, with ``dof`` and their standard ``errors`` (rounded, None where unknown) for each, layer and head,
        and ``largest``, the exact maximum over heads;
        ``even``, for each shape and budget (features, window, sinks) of strategy ``hybrid``; ``contexts``, the first of
        them None, for all positions; ``compressed``, for each context, shape and budget (window, sinks, stages) or
        None, see :func:`_counts`, up to the largest budget that a single head may have; ``fillable``, for each context
        and shape the budget with which a head has places for all its positions, or None where nobody says how many
        there are; and ``curves``, for each file and layer the choices of
        strategy ``measured``: (bytes, loss, sizes of each head).
    """
    costs = [{kept: _cost(profile, layer, kept) for kept in TOKEN_DTYPES} for layer in profile.layers]
    defaults = [default_token_dtype(layer.causal) for layer in profile.layers]
    lambdas = sorted({*LAMBDAS, lam})
    dof = [profile.dof(each) for each in lambdas]
    most = min(max(4 * budget, _BUDGETS[0]), max(_BUDGETS[1], budget))
    largest = math.ceil(most * max(largest_share, 1.0))
    kinds = [cost[kept] for cost, kept in zip(costs, defaults, strict=True)]
    shapes = list(dict.fromkeys(kinds))
    examples = [(profile.layers[kinds.index(shape)], shape) for shape in shapes]
    contexts = list(dict.fromkeys([None, *contexts]))
    positions = [context or profile.positions for context in contexts]
    fillable = [
        most and [budget_for(most, x.head_dim, x.value_dim, cost) for x, cost in examples] for most in positions
    ]
    if full_heads:
        largest = max(largest, *(budget for budgets in fillable for budget in budgets or ()))
    return {
        "layers": [
            {
                "name": layer.name,
                "heads": layer.kv_heads,
                "head_dim": layer.head_dim,
                "cost": {kept: [own.feature, own.token] for kept, own in cost.items()},
                "tokens": kept,
            }
            for layer, cost, kept in zip(profile.layers, costs, defaults, strict=True)
        ],
        "skipped": [{"name": x.name, "reason": x.reason} for x in profile.skipped],
        "samples": profile.samples,
        "normalization": profile.normalization,
        "budget": budget,
        "most": most,
        "lambda": lam,
        "lambdas": lambdas,
        "dof": [[[float(f"{n:.4g}") for n in row] for row in rows] for rows in dof],
        "errors": [[[_known(n) for n in row] for row in profile.dof_errors(each)] for each in lambdas],
        "largest": [[max(row) for row in rows] for rows in dof],
        "shapes": [shapes.index(kind) for kind in kinds],
        "even": [[even_size(n, shape) for n in range(1, most + 1)] for shape in shapes],
        "contexts": contexts,
        "compressed": [
            [[_counts(n, layer, shape, most) for n in range(1, largest + 1)] for layer, shape in examples]
            for most in positions
        ],
        "fillable": fillable,
        "curves": [
            _choices(file, found, profile, costs)
            for file, found in curves.items()
            if {x.name for x in profile.layers} <= {x.name for x in found.layers}
        ],
    }


def _known(error: float) -> float | None:
    return None if math.isnan(error) else float(f"{error:.2g}")


def _cost(profile: Profile, layer: LayerProfile, kept: str) -> HeadCost:
    return HeadCost.of(layer.head_dim, layer.value_dim, profile.itemsize, kept)


def _counts(budget: int, layer: LayerProfile, cost: HeadCost, positions: int | None) -> list[Any] | None:
    """Window, sinks and, of each stage, tokens, bits and bytes; None where there can be no such cache."""
    if not layer.causal:
        return None
    try:
        found = even_counts(budget, layer.head_dim, layer.value_dim, cost, positions)
    except DoflaError:  # other sizes of heads, or too small a budget
        return None
    plan = LayerPlan(layer.name, 1, layer.head_dim, layer.value_dim, feature_map="none", **asdict(found))
    coded = plan.bytes_by_kind(itemsize=1)[2]  # whatever the type of the model
    stages = [[tokens, bits, coded[bits]] for tokens, bits in plan.coded_per_head[0]]
    return [found.window, found.sinks, stages]


def _choices(file: str, curves: Curves, profile: Profile, costs: list[dict[str, HeadCost]]) -> dict[str, Any]:
    kept = curves.made_by.get("token_dtype", "model")
    by_name = {curve.name: curve for curve in curves.layers}
    hulls = [
        best_sizes(by_name[layer.name], Shape(layer.kv_heads, cost[kept]))
        for layer, cost in zip(profile.layers, costs, strict=True)
    ]
    choices = [[[x.bytes, x.loss, x.sizes] for x in hull] for hull in hulls]
    return {"file": file, "map": curves.made_by.get("feature_map"), "tokens": kept, "choices": choices}
