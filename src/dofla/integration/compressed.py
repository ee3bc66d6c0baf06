"""The plan of a compressed cache for a model, and the units of its size."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from torch import bfloat16
from transformers import PreTrainedModel

from dofla.errors import DoflaError
from dofla.integration.positions import positions_of
from dofla.integration.sites import AttentionSite, attention_sites
from dofla.integration.surgery import plan_by_site, refuse
from dofla.plans.compressed import COMPRESSED, PER_HEAD, TooSmall, even_counts, fillable, smallest_budget
from dofla.plans.head_budgets import HeadBudgets, flat_head_budgets
from dofla.plans.hybrid import HeadCost, check_budget
from dofla.plans.plan import Plan
from dofla.plans.size import in_bytes, size_or_ratio


def compressed_plan(
    model: PreTrainedModel,
    budget: float = 64,
    *,
    head_budgets: HeadBudgets | None = None,
    keep_softmax: Collection[str] = (),
    context: int | None = None,
) -> Plan:
    """The plan that :func:`dofla.compress` makes for a model: tiers of tokens, no features.

    Args:
        model: a causal one.
        budget: bytes, in features per KV head (:func:`budget_of`).
        head_budgets: default the same for all. Bytes that a head cannot fill go to the others, and then to more bits.
        keep_softmax: layers to leave as they are.
        context: tokens that the cache is for; default all positions of the model.

    Raises:
        DoflaError: as :func:`dofla.compress`.
    """
    check_budget(budget)
    positions, sites = context or positions_of(model), _compressed_sites(model, keep_softmax)
    shapes = {site.name: (site.head_dim, site.value_dim, _cost(site, model)) for site in sites}
    unit = _feature_bytes(sites, model)
    if head_budgets is not None and head_budgets.full_heads and positions is None:
        raise DoflaError(f"{type(model).__name__} states no number of positions: give context, which such heads hold")
    if head_budgets is not None and positions is not None and budget > 0:  # no other is enough for any head
        head_budgets = fillable(head_budgets, budget, positions, shapes)

    def size(site: AttentionSite) -> dict[str, Any]:
        refuse(site)
        if not site.causal:
            raise DoflaError(f"layer {site.name} is bidirectional: an encoder keeps no tokens, linearize it instead")
        even = [budget] * site.kv_heads
        budgets = even if head_budgets is None else head_budgets.budgets(site.name, site.kv_heads, budget)
        try:
            sizes = [asdict(even_counts(own, *shapes[site.name], positions)) for own in budgets]
        except TooSmall:
            least = 1.0 if head_budgets is None else min(1.0, *flat_head_budgets(head_budgets.layers))
            raise too_small(round(budget * unit), _smallest(sites, model, least)) from None
        alike = len(set(budgets)) == 1
        fields = {name: sizes[0][name] if alike else [own[name] for own in sizes] for name in PER_HEAD}
        return {**sizes[0], **fields, "feature_map": "none"}

    made_by: dict[str, Any] = {"strategy": COMPRESSED, "size": round(budget * unit)}
    if head_budgets is not None:
        made_by["head_budgets"] = head_budgets.layers
        if "held_out" in head_budgets.made_by:
            made_by["held_out"] = head_budgets.made_by["held_out"]
        if head_budgets.full_heads:
            made_by["retrieval_heads"] = head_budgets.full_heads
    return plan_by_site(model, size, keep_softmax, made_by, context)


def too_small(size: int, least: int) -> TooSmall:
    """The error for a size without room for a token of each kind in every KV head."""
    return TooSmall(
        f"size {in_bytes(size)} is too small for a token of each kind in every KV head: give {in_bytes(least)} or more"
    )


def smallest_size(model: PreTrainedModel, share: float = 1.0, keep_softmax: Collection[str] = ()) -> int:
    """Bytes with which a KV head that gets ``share`` of an even split has room for a token of each kind."""
    return _smallest(_compressed_sites(model, keep_softmax), model, share)


def feature_bytes(model: PreTrainedModel, keep_softmax: Collection[str] = ()) -> int:
    """Bytes of one feature in every KV head that is compressed: the unit of budgets."""
    return _feature_bytes(_compressed_sites(model, keep_softmax), model)


def budget_of(
    model: PreTrainedModel,
    size: int | str | None = None,
    ratio: float | None = None,
    *,
    context: int | None = None,
    keep_softmax: Collection[str] = (),
) -> float:
    """A size in features per KV head: the bytes of all compressed layers, over :func:`feature_bytes`.

    Args:
        model: a causal one.
        size, ratio, context, keep_softmax: as for :func:`dofla.compress`.

    Raises:
        DoflaError: as :func:`dofla.plans.size.size_or_ratio`.
    """
    length = context or positions_of(model)
    sites = _compressed_sites(model, keep_softmax)
    cached = sum(x.kv_heads * (x.head_dim + x.value_dim) for x in sites) * bfloat16.itemsize
    found = size_or_ratio(size, ratio, length and length * cached, type(model).__name__)
    return found / (_feature_bytes(sites, model) or found)


def _compressed_sites(model: PreTrainedModel, keep_softmax: Collection[str]) -> list[AttentionSite]:
    sites = attention_sites(model).values()
    return [x for x in sites if not (x.linear_time or x.shares_keys or x.name in keep_softmax)]


def _feature_bytes(sites: Collection[AttentionSite], model: PreTrainedModel) -> int:
    return sum(x.kv_heads * _cost(x, model).feature for x in sites)


def _smallest(sites: Collection[AttentionSite], model: PreTrainedModel, share: float) -> int:
    fitting = [x for x in sites if x.head_dim % 8 == x.value_dim % 8 == 0]
    least = max((smallest_budget(x.head_dim, x.value_dim, _cost(x, model)) for x in fitting), default=1)
    return math.ceil(least / share) * _feature_bytes(sites, model)


def _cost(site: AttentionSite, model: PreTrainedModel) -> HeadCost:
    return HeadCost.of(site.head_dim, site.value_dim, model.dtype.itemsize, "int8")
