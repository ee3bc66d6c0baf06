"""How layers share the bytes of a memory that fades."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dofla.errors import DoflaError
from dofla.plans.shares import FACTORS, Shares

EFFECT = st.floats(-1, 1, allow_nan=False)
LAYERS = st.lists(
    st.tuples(st.lists(EFFECT, min_size=len(FACTORS) - 1, max_size=len(FACTORS) - 1), st.integers(100, 9_000)),
    min_size=1,
    max_size=8,
)


def better(layers, before=None):
    effects = {f"layer.{n}": [0.0, *own] for n, (own, _) in enumerate(layers)}
    shares = Shares(before or dict.fromkeys(effects, 1.0))
    return shares.better(effects, {f"layer.{n}": size for n, (_, size) in enumerate(layers)})


@given(LAYERS, st.integers(0, 2**32))
def test_shares_take_the_bytes_of_an_even_split(layers, seed):
    rng, sizes = random.Random(seed), [size for _, size in layers]
    drawn = [rng.uniform(0.3, 3) for _ in layers]
    spent = sum(share * size for share, size in zip(drawn, sizes, strict=True))
    before = {f"layer.{n}": share * sum(sizes) / spent for n, share in enumerate(drawn)}
    shares = better(layers, before)
    spent = sum(share * size for share, size in zip(shares.layers.values(), sizes, strict=True))
    assert spent == pytest.approx(sum(sizes), rel=1e-12)
    # Steps are relative to what a layer had, and to one another at most the ratio of the factors.
    ratios = [shares.layers[name] / share for name, share in before.items()]
    assert max(ratios) <= min(ratios) * max(FACTORS) / min(FACTORS) * (1 + 1e-12)


def test_bytes_go_where_they_do_most():
    falls, flat = [0.4, -0.4], [0.01, -0.01]
    shares = better([(falls, 1_000), (flat, 1_000), (flat, 1_000)])
    assert shares.layers["layer.0"] == pytest.approx(2 * shares.layers["layer.1"])
    assert shares.layers["layer.1"] == shares.layers["layer.2"] < 1


def test_what_costs_more_must_bring_more():
    same = [0.2, -0.2]
    shares = better([(same, 1_000), (same, 8_000)])
    assert shares.layers["layer.0"] > shares.layers["layer.1"]


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
