"""What a memory that fades makes of a model: its plan."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedModel

from dofla.errors import DoflaError
from dofla.integration.positions import positions_of
from dofla.integration.sites import AttentionSite, attention_sites
from dofla.integration.surgery import plan_by_site, refuse
from dofla.plans.fading import FADING, PER_HEAD, fade_evenly, fillable
from dofla.plans.hybrid import HeadCost, check_budget
from dofla.plans.plan import Plan
from dofla.plans.shares import Shares


def fading_plan(
    model: PreTrainedModel,
    budget: float = 64,
    *,
    shares: Shares | None = None,
    keep_softmax: Collection[str] = (),
    reach: int | None = None,
) -> Plan:
    """What :func:`dofla.fade` makes of a model: stages of tokens, no features.

    Args:
        model: a causal one.
        budget: bytes, as so many features per KV head.
        shares: of the KV heads; default the same for all. What a head could not fill goes to the others, and then
            to more bits.
        keep_softmax: layers to leave as they are.
        reach: positions that the memory is for; default all that the model has.

    Raises:
        DoflaError: as :func:`dofla.fade`.
    """
    check_budget(budget)
    positions, shapes = reach or positions_of(model), {}
    for site in attention_sites(model).values():
        if site.name not in keep_softmax:
            cost = HeadCost.of(site.head_dim, site.value_dim, model.dtype.itemsize, "int8")
            shapes[site.name] = site.head_dim, site.value_dim, cost
    if shares is not None and shares.whole and positions is None:
        raise DoflaError(f"{type(model).__name__} has any number of positions: say by reach how many heads are to hold")
    if shares is not None and positions is not None and budget > 0:  # no other is enough for any head
        shares = fillable(shares, budget, positions, shapes)

    def size(site: AttentionSite) -> dict[str, Any]:
        refuse(site)
        if not site.causal:
            raise DoflaError(f"layer {site.name} sees both ways: an encoder keeps no tokens, linearize it instead")
        budgets = [budget] * site.kv_heads if shares is None else shares.budgets(site.name, site.kv_heads, budget)
        sizes = [asdict(fade_evenly(own, *shapes[site.name], positions)) for own in budgets]
        alike = len(set(budgets)) == 1
        fields = {name: sizes[0][name] if alike else [own[name] for own in sizes] for name in PER_HEAD}
        return {**sizes[0], **fields, "feature_map": "none"}

    made_by = {"strategy": FADING, "budget": budget} | ({} if shares is None else {"shares": shares.layers})
    if shares is not None and "held_out" in shares.made_by:
        made_by["held_out"] = shares.made_by["held_out"]
    if shares is not None and shares.whole:
        made_by["retrieval_heads"] = shares.whole
    return plan_by_site(model, size, keep_softmax, made_by, reach)
