"""Sizes in features per KV head, the unit in which the arithmetic of compressed caches works."""

from __future__ import annotations

from dofla.integration.compressed import feature_bytes

import dofla
from dofla.integration.wrapped import unwrapped


def size_of(model, budget=64, keep_softmax=()):
    """Bytes of ``budget`` features per KV head that is compressed."""
    return budget * feature_bytes(unwrapped(model), keep_softmax) or 1


def compress(model, windows, *, budget=None, **options):
    """:func:`dofla.compress` to the bytes of ``budget`` features per KV head, or to its default size."""
    size = None if budget is None else size_of(model, budget, options.get("keep_softmax", ()))
    return dofla.compress(model, windows, size, **options)


def measure_head_budgets(model, windows, budget, **options):
    """:func:`dofla.measure_head_budgets` for the bytes of ``budget`` features per KV head."""
    size = size_of(model, budget, options.get("keep_softmax", ()))
    return dofla.measure_head_budgets(model, windows, size, **options)


def frontier(model, windows, texts, *, budgets, **options):
    """:func:`dofla.frontier` of the bytes of so many features per KV head."""
    return dofla.frontier(model, windows, texts, sizes=[size_of(model, budget) for budget in budgets], **options)
