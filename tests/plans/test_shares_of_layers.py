"""How layers share the bytes of a memory that fades."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dofla.errors import DoflaError
from dofla.plans.shares import FACTORS, RUNG, Ladder, Shares

EFFECT = st.floats(-1, 1, allow_nan=False)
LAYERS = st.lists(
    st.tuples(st.lists(EFFECT, min_size=len(FACTORS) - 1, max_size=len(FACTORS) - 1), st.integers(100, 9_000)),
    min_size=1,
    max_size=8,
)


def climbed(layers, *steps):
    """Shares after effects of each step, of layers of so many bytes."""
    ladder, names = Ladder(dict(enumerate(layers))), range(len(layers))
    return [list(ladder.climb({n: [0.0, *step[n]] for n in names}).values()) for step in steps]


@given(LAYERS, st.integers(1, 4))
def test_shares_take_the_bytes_of_an_even_split(layers, count):
    sizes = [size for _, size in layers]
    before = [1.0] * len(sizes)
    for shares in climbed(sizes, *[[own for own, _ in layers]] * count):
        spent = sum(share * size for share, size in zip(shares, sizes, strict=True))
        assert spent == pytest.approx(sum(sizes), rel=1e-12)
        # No layer is sent where nothing was measured: up or down by a rung beyond where it has been.
        ratios = [after / share for after, share in zip(shares, before, strict=True)]
        assert max(ratios) <= min(ratios) * RUNG ** (2 * count) * (1 + 1e-12)
        before = shares


def test_bytes_go_where_they_do_most():
    falls, flat = [0.4, -0.4], [0.01, -0.01]
    (shares,) = climbed([1_000] * 3, [falls, flat, flat])
    assert shares[0] == pytest.approx(RUNG**2 * shares[1])
    assert shares[1] == shares[2] < 1


def test_what_costs_more_must_bring_more():
    same = [0.2, -0.2]
    (shares,) = climbed([1_000, 8_000], [same, same])
    assert shares[0] > shares[1]


def test_a_layer_keeps_what_it_was_given_for_a_reason():
    much, little, some = [0.1, -0.5], [0.01, -0.01], [0.05, -0.05]
    first, second = climbed([1_000] * 3, [much, little, little], [[0.0, 0.0], some, some])
    assert first[0] > first[1] == first[2]
    # Alone, the second step says that the first layer could do with less; of both together .25 nats speak against it.
    assert second[0] == pytest.approx(first[0])


def test_a_layer_that_nobody_measured_has_its_even_part():
    shares = Shares({"a": 1.5})
    assert [shares.budget(name, 64) for name in ("a", "b")] == [96, 64]
    assert Shares({"a": 1 / 3}).budget("a", 96) == 32


def test_shares_are_read_as_they_were_written(tmp_path):
    shares = Shares({"a": 0.7, "b": 1.3}, {"a": [0.0] * len(FACTORS)}, "teacher", {"budget": 64})
    shares.save(tmp_path / "shares.json")
    assert Shares.load(tmp_path / "shares.json") == shares
    assert "0.70" in str(shares)


@pytest.mark.parametrize("damage", [{}, {"layers": {}}, {"layers": {"a": -1}}, {"layers": 3}, {"layers": {"a": "x"}}])
def test_damaged_shares_are_named(tmp_path, damage):
    path = tmp_path / "shares.json"
    path.write_text(json.dumps(damage))
    with pytest.raises(DoflaError, match=r"shares\.json holds no shares .*: measure them again"):
        Shares.load(path)
