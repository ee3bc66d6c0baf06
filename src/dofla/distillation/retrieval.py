"""The few KV heads that facts are looked up with (retrieval heads, Wu et al. 2024, arXiv 2404.15574).

They are found by what their forgetting costs where facts stand far back. With places for every token they find most of
what the model finds; what the others then forget costs text more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.data import TokenWindows
from dofla.data.facts import Facts
from dofla.distillation.forgetting import costs_of_heads
from dofla.errors import DoflaError
from dofla.integration.placement import placed_over
from dofla.integration.positions import positions_of
from dofla.integration.student import Student
from dofla.plans.head_budgets import HeadBudgets
from dofla.plans.plan import Plan

FAR = 4096
"""Tokens of a document with facts in it, if the model has so many positions and the text so many tokens."""


def check_retrieval_heads(
    even: Plan, heads: int, tokenizer: PreTrainedTokenizerBase | None, plan: Callable[[HeadBudgets], Plan]
) -> None:
    """See that so many can be found and will have room; 0 for none.

    Args:
        even: the plan in which all KV heads have the same size.
        heads: that are to hold every token.
        tokenizer: to tell facts with.
        plan: makes one of the same bytes by shares.

    Raises:
        DoflaError: fewer than none; no tokenizer; no end of positions; too few bytes for so many.
    """
    if heads < 0:
        raise DoflaError(f"retrieval_heads is {heads}: give how many KV heads are to hold every token, or 0")
    if heads == 0:
        return
    needed_tokenizer(tokenizer, heads)
    head_budgets = {layer.name: [1.0] * layer.kv_heads for layer in even.layers if not layer.keep_softmax}
    places = [(name, head) for name, own in head_budgets.items() for head in range(len(own))]
    if heads > len(places):
        raise DoflaError(f"retrieval_heads is {heads}: the model has {len(places)} KV heads")
    plan(HeadBudgets(head_budgets, full_heads=_by_layer(places[:heads])))


def needed_tokenizer(tokenizer: PreTrainedTokenizerBase | None, heads: int) -> PreTrainedTokenizerBase:
    """The tokenizer, to find so many heads with; DoflaError if there is none."""
    if tokenizer is None:
        raise DoflaError(f"retrieval_heads is {heads}: give the tokenizer too, to tell facts among the text")
    return tokenizer


def facts_for(
    model: PreTrainedModel, windows: TokenWindows, tokenizer: PreTrainedTokenizerBase, context: int | None
) -> Facts:
    """The facts among the windows' text by which retrieval heads are found; DoflaError as :meth:`Facts.among`."""
    return Facts.among(windows, tokenizer, min(FAR, context or positions_of(model) or FAR))


def with_retrieval_heads(
    student: Student, head_budgets: HeadBudgets, heads: int, facts: Facts, report: Callable[[], None]
) -> HeadBudgets:
    """``head_budgets`` with the ``heads`` KV heads on which most hangs holding every token.

    A student with these shares looks facts up. What forgetting still costs in a head there, as it would be at an even
    split (cost times share), is set beside what it cost on text: of either, its part of what all cost.
    """
    found = costs_of_heads(student, list(placed_over(facts.documents, 1, None)), report, facts.asked)
    places = [(name, head) for name, own in head_budgets.layers.items() for head in range(len(own))]
    text = [head_budgets.costs[name][head] for name, head in places]
    looked_up = [found[name][head].item() * head_budgets.layers[name][head] for name, head in places]
    of_all = [sum(parts) for parts in zip(_parts(text), _parts(looked_up), strict=True)]
    first = {place for _, place in sorted(zip(of_all, places, strict=True), reverse=True)[:heads]}
    return replace(head_budgets, full_heads=_by_layer([place for place in places if place in first]))


def _parts(costs: list[float]) -> list[float]:
    """Each as a part of what all cost that cost anything."""
    total = sum(max(cost, 0.0) for cost in costs)
    return [cost / total if total else 0.0 for cost in costs]


def _by_layer(places: list[tuple[str, int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for name, head in places:
        found.setdefault(name, []).append(head)
    return found
