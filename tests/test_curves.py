"""Error curves, and the knapsack over them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.curves import Choice, Curves, LayerCurve, Point, Shape, _hull, choose
from dofla.errors import DoflaError
from dofla.hybrid import HeadCost

COST = HeadCost.of(8, 8, 4)
SHAPE = Shape(2, COST)
quick = settings(max_examples=60, deadline=None, derandomize=True)


def curve(name, effect=1.0, level=1.0, power=1.0):
    """Errors that fall as a power of the bytes, exact tokens and features alike."""
    sizes = (200, 1000, 5000)
    return LayerCurve(name, effect, [Point(share, n, level * n**-power) for share in (0.2, 0.7) for n in sizes])


def test_between_measured_sizes_errors_follow_a_power_law_and_beyond_them_stay():
    one = curve("a", power=0.5)
    assert one.error(0.7, 400) == pytest.approx(400**-0.5)
    assert one.error(0.7, 3000) == pytest.approx(3000**-0.5)
    assert one.error(0.2, 10) == pytest.approx(200**-0.5)
    assert one.error(0.2, 1e6) == pytest.approx(5000**-0.5)


@quick
@given(
    effects=st.lists(st.floats(0.01, 100), min_size=1, max_size=5),
    powers=st.lists(st.floats(0.1, 2), min_size=5, max_size=5),
    total=st.integers(4000, 60_000),
    context=st.sampled_from([None, 10, 200]),
)
def test_a_choice_stays_within_the_budget_and_beats_the_even_one(effects, powers, total, context):
    curves = [curve(str(n), effect, power=powers[n]) for n, effect in enumerate(effects)]
    shapes = {one.name: SHAPE for one in curves}
    chosen = choose(curves, shapes, total, context)
    assert sum(choice.bytes for choice in chosen.values()) <= total
    for one in curves:
        choice = chosen[one.name]
        if choice.size is None:
            assert choice.bytes == context * COST.token * SHAPE.kv_heads
        else:
            assert choice.bytes == COST.total(*choice.size) * SHAPE.kv_heads
    even = choose([curve(one.name) for one in curves], shapes, total)
    even_loss = sum(one.effect * one.error(0.7, even[one.name].bytes / SHAPE.kv_heads) for one in curves)
    # Sizes are whole tokens, so the best choice can miss the relaxation's by a step.
    assert sum(choice.loss for choice in chosen.values()) <= even_loss * 1.1 + 1e-9


def test_what_harms_more_gets_more():
    chosen = choose([curve("weak", 1), curve("strong", 50)], {"weak": SHAPE, "strong": SHAPE}, 5000)
    assert chosen["strong"].bytes > 1.5 * chosen["weak"].bytes


def test_a_layer_stays_softmax_where_its_cache_is_worth_its_bytes():
    curves, shapes = [curve("weak", 1), curve("strong", 1e4)], {"weak": SHAPE, "strong": SHAPE}
    chosen = choose(curves, shapes, 8000, context=40)
    assert chosen["strong"] == Choice(40 * COST.token * 2, 0.0, None)
    assert chosen["weak"].size is not None
    assert choose(curves, shapes, 8000, context=4000)["strong"].size is not None


def test_a_budget_below_the_smallest_sizes_is_refused():
    with pytest.raises(DoflaError, match="the budget is 100: measure the curves at this budget"):
        choose([curve("a")], {"a": SHAPE}, 100)


def test_the_hull_is_convex_and_falls():
    hull = _hull([Choice(b, loss, None) for b, loss in ((1, 9.0), (2, 8.5), (3, 4.0), (4, 4.5), (5, 3.0), (9, 2.9))])
    assert [choice.bytes for choice in hull] == [1, 3, 5, 9]


def test_curves_are_read_as_they_were_written(tmp_path):
    curves = Curves([curve("a", 2.0), curve("b")], "teacher", {"steps": 3})
    curves.save(tmp_path / "curves.json")
    assert Curves.load(tmp_path / "curves.json") == curves


def layers(**changes):
    """Layers of a file, with a point that is off."""
    return {"layers": [{"name": "a", "effect": 1.0, "points": [{"share": 0.7, "bytes": 9, "error": 0.1} | changes]}]}


@pytest.mark.parametrize(
    "damage",
    [
        {"layers": []},
        {"layers": [{"name": "a"}]},
        {"layers": 3},
        {"layers": [{"name": "a", "effect": 1.0, "points": []}]},
        {"layers": [{"name": "a", "effect": "much", "points": layers()["layers"][0]["points"]}]},
        {"layers": [{"name": "a", "effect": float("inf"), "points": layers()["layers"][0]["points"]}]},
        layers(bytes=0),
        layers(bytes="9"),
        layers(share=1.5),
        layers(error=float("nan")),
        layers(error=None),
        layers(color="red"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, damage):
    path = tmp_path / "curves.json"
    Curves([curve("a")], "teacher").save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | layers()))
    assert len(Curves.load(path).layers) == 1
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(DoflaError, match=r"curves\.json holds no error curves .*measure them again"):
        Curves.load(path)
