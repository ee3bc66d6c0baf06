"""How one KV head with a memory that fades spends its bytes."""

from __future__ import annotations

import pytest
from dofla.plans.compressed import BITS, budget_for, even_counts
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.attention import tier_bytes
from dofla.errors import DoflaError
from dofla.plans.hybrid import HeadCost

quick = settings(max_examples=200, deadline=None, derandomize=True)
DIMS = st.integers(1, 32).map(lambda n: 8 * n)


def tokens_and_bytes(found, head_dim, value_dim, cost):
    ((newest, bits),) = found.tiers
    exact, coded = found.window + found.sinks, newest + found.heavy_hitters
    return exact + coded, exact * cost.token + coded * tier_bytes(head_dim, value_dim, bits, scored=True)


@quick
@given(budget=st.integers(64, 4_000), head_dim=DIMS, value_dim=DIMS, most=st.none() | st.integers(5, 9_000))
def test_bytes_are_spent_on_tokens_and_beyond_the_most_on_their_bits(budget, head_dim, value_dim, most):
    cost = HeadCost.of(head_dim, value_dim, 4, "int8")
    tokens, spent = tokens_and_bytes(even_counts(budget, head_dim, value_dim, cost, most), head_dim, value_dim, cost)
    free, _ = tokens_and_bytes(even_counts(budget, head_dim, value_dim, cost), head_dim, value_dim, cost)
    assert tokens == (free if most is None else min(free, most))
    in_eight_bits = (tokens - 2) * cost.token + 2 * tier_bytes(head_dim, value_dim, BITS, scored=True)
    assert spent <= budget * cost.feature
    assert spent == in_eight_bits or budget * cost.feature - spent < cost.token


@quick
@given(tokens=st.integers(200, 9_000), head_dim=DIMS, value_dim=DIMS)
def test_the_budget_for_so_many_tokens_is_the_least_that_holds_them(tokens, head_dim, value_dim):
    cost = HeadCost.of(head_dim, value_dim, 4, "int8")
    budget = budget_for(tokens, head_dim, value_dim, cost)
    rounding = 1 + cost.token / tier_bytes(head_dim, value_dim, BITS, scored=True)
    held, fewer = (
        tokens_and_bytes(even_counts(n, head_dim, value_dim, cost), head_dim, value_dim, cost)[0]
        for n in (budget, budget - 1)
    )
    assert held >= tokens - rounding
    assert fewer <= tokens + rounding


def test_a_head_has_a_token_of_each_kind():
    cost = HeadCost.of(64, 64, 4, "int8")
    assert even_counts(9_000, 64, 64, cost, most=1).heavy_hitters == 1
    with pytest.raises(DoflaError, match="budget 1 is too small"):
        even_counts(1, 64, 64, cost, most=1)
