"""How KV heads share the bytes of a compressed cache."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dofla.compression.head_budgets import LEAST, LEAST_OF_ALL, MOST, READING, RUNG, HeadBudgets, divide, with_reading
from dofla.errors import DoflaError
from dofla.plans.plan import held_out_line

COST = st.floats(-1, 1) | st.floats(-1e-6, 1e-6)
LAYERS = st.lists(st.tuples(st.lists(COST, min_size=1, max_size=8), st.integers(100, 9_000)), min_size=1, max_size=12)


@given(LAYERS)
def test_shares_take_the_bytes_of_an_even_split(layers):
    sizes, costs = dict(enumerate(size for _, size in layers)), dict(enumerate(own for own, _ in layers))
    found = divide(sizes, costs)
    spent = sum(share * sizes[name] for name, own in found.items() for share in own)
    assert spent == pytest.approx(sum(sizes[name] * len(own) for name, own in costs.items()))
    lowest = min(share for own in found.values() for share in own)
    for name, own in found.items():
        assert len(own) == len(costs[name])
        for share in own:
            rung = math.log(share / lowest, RUNG)
            assert rung == pytest.approx(round(rung), abs=1e-9)
            assert rung <= math.log(MOST / LEAST, RUNG) + 1e-9


def test_heads_share_by_the_root_of_what_eviction_costs():
    # Beside heads that need nothing, few enough that bytes run out before anybody has the most.
    found = divide({"a": 100, "rest": 100}, {"a": [0.64, 0.16, 0.04, 0.04], "rest": [0.0] * 12})["a"]
    for more, less in ((found[0], found[1]), (found[1], found[2])):
        assert 2 / RUNG - 1e-9 <= more / less <= 2 * RUNG + 1e-9
    found = divide({"a": 100, "rest": 100}, {"a": [0.64, 0.16], "rest": [0.0] * 98})
    assert [share / found["rest"][0] for share in found["a"]] == pytest.approx([MOST / LEAST] * 2)


def test_a_byte_is_worth_more_in_a_smaller_head():
    found = divide({"small": 100, "large": 800}, {"small": [0.1] * 8, "large": [0.1] * 8})
    assert min(found["small"]) > max(found["large"])


@pytest.mark.parametrize("cost", [-0.5, 0.0])
def test_what_gains_nothing_by_more_is_given_least(cost):
    found = divide({"a": 100}, {"a": [cost, 0.1, 0.1, 0.1]})["a"]
    assert found[0] == min(found) < max(found[1:])


@given(LAYERS, st.floats(0.2, 3), st.floats(0.2, 3), st.data())
def test_nobody_gets_more_than_can_be_filled_and_the_others_share_the_rest(layers, most, of_first, data):
    sizes, costs = dict(enumerate(size for _, size in layers)), dict(enumerate(own for own, _ in layers))
    heads, counts = [(x, n) for x, own in costs.items() for n in range(len(own))], {x: len(costs[x]) for x in costs}
    grow = data.draw(st.sets(st.sampled_from(heads)))
    shares, growing = divide(sizes, costs), {x: [n for name, n in sorted(grow) if name == x] for x in sizes}
    bounds, total = {name: sizes[name] * (most if name else of_first) for name in sizes}, sum(sizes.values())
    found = HeadBudgets(shares, growing).divided(total, counts, sizes, bounds)
    assert all(found[name][n] == 0 for name, n in grow)
    if not (rest := [head for head in heads if head not in grow]):
        return
    beyond = max(total / sum(bounds[name] for name, _ in rest), 1)  # or all get as much more
    assert all(found[name][n] <= beyond * bounds[name] * (1 + 1e-9) for name, n in rest)
    assert sum(found[name][n] for name, n in rest) == pytest.approx(total)
    below = [(name, n) for name, n in rest if found[name][n] < beyond * bounds[name] * (1 - 1e-9)]
    more = [found[name][n] / (shares[name][n] * sizes[name]) for name, n in below]
    assert max(more, default=1) == pytest.approx(min(more, default=1))  # in proportion to what they have


def test_what_a_plan_says_of_them():
    head_budgets = HeadBudgets({"a": [1.5, 0.5]})
    assert head_budgets.record() == {"head_budgets": {"a": [1.5, 0.5]}}
    compared = HeadBudgets({"a": [1.5, 0.5]}, {"a": [1]}, {"even": 0.3, "eviction": 0.2})
    assert compared.record() == head_budgets.record() | {
        "retrieval_heads": {"a": [1]},
        "held_out": {"even": 0.3, "eviction": 0.2},
    }
    assert held_out_line(compared.held_out).endswith(": 0.3 even, 0.2 eviction (kept)")
    assert held_out_line({"even": 0.1, "eviction": 0.2, "reading": 0.1}).endswith("0.2 eviction, 0.1 reading (kept)")


@given(LAYERS, st.data())
def test_a_second_reading_gets_its_part_of_the_bytes(layers, data):
    sizes, costs = dict(enumerate(size for _, size in layers)), dict(enumerate(own for own, _ in layers))
    amount = st.floats(0.01, 9)
    reading = {x: data.draw(st.lists(amount, min_size=len(own), max_size=len(own))) for x, own in costs.items()}
    shares = divide(sizes, costs)
    found = with_reading(sizes, shares, reading)
    total, read = (sum(sizes[x] * sum(own) for x, own in y.items()) for y in (shares, reading))
    for x, own in found.items():
        wanted = [(1 - READING) * a + READING * b * total / read for a, b in zip(shares[x], reading[x], strict=True)]
        assert own == pytest.approx(wanted)
    assert sum(sizes[x] * sum(own) for x, own in found.items()) == pytest.approx(total)
    assert min(min(own) for own in found.values()) >= LEAST_OF_ALL - 1e-9


def test_layers_that_were_not_measured_get_an_even_split_and_others_are_refused():
    head_budgets, sizes = HeadBudgets({"a": [1.5, 0.5]}), {"a": 100.0, "b": 300.0}
    found = head_budgets.divided(800, {"a": 2, "b": 2}, sizes, {"a": math.inf, "b": 500})
    assert found == {"a": [150, 50], "b": [300, 300]}
    with pytest.raises(DoflaError, match="layer a has 3 KV heads, and was calibrated with 2: calibrate again"):
        head_budgets.divided(800, {"a": 3}, sizes, sizes)
