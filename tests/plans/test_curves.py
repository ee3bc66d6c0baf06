"""Error curves, and the knapsack over them."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.errors import DoflaError
from dofla.plans.curves import Choice, Curves, LayerCurve, Point, Shape, _losses, best_sizes, choose
from dofla.plans.hybrid import HeadCost
from dofla.plans.knapsack import lower_hull

COST = HeadCost.of(8, 8, 4)
SHAPE = Shape(2, COST)
quick = settings(max_examples=25, derandomize=True)


def curve(name, effects=(1.0, 1.0), level=1.0, power=1.0):
    """Errors that fall as a power of the bytes, exact tokens and features alike; level and power of all heads, or of
    each."""
    sizes = (200, 1000, 5000)
    heads = range(len(effects))
    levels, powers = ([x] * len(effects) if isinstance(x, float | int) else x for x in (level, power))
    points = [Point(share, n, [levels[h] * n ** -powers[h] for h in heads]) for share in (0.2, 0.7) for n in sizes]
    return LayerCurve(name, list(effects), points)


def test_between_measured_sizes_errors_follow_a_power_law_and_beyond_them_stay():
    one = curve("a", power=[0.5, 1.5])
    for head, power in enumerate((0.5, 1.5)):
        assert one.error(head, 0.7, 400) == pytest.approx(400**-power)
        assert one.error(head, 0.7, 3000) == pytest.approx(3000**-power)
        assert one.error(head, 0.2, 10) == pytest.approx(200**-power)
        assert one.error(head, 0.2, 1e6) == pytest.approx(5000**-power)


def total_loss(chosen):
    return sum(choice.loss for choice in chosen.values())


@quick
@given(
    effects=st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)), min_size=1, max_size=5),
    powers=st.lists(st.floats(0.1, 2), min_size=5, max_size=5),
    total=st.integers(4000, 60_000),
    context=st.sampled_from([None, 10, 200]),
    per_head=st.booleans(),
)
def test_a_choice_stays_within_the_budget_and_beats_the_even_one(effects, powers, total, context, per_head):
    curves = [curve(str(n), effect, power=powers[n]) for n, effect in enumerate(effects)]
    shapes = {one.name: SHAPE for one in curves}
    chosen = choose(curves, shapes, total, context, per_head=per_head)
    assert sum(choice.bytes for choice in chosen.values()) <= total
    for one in curves:
        choice = chosen[one.name]
        if choice.sizes is None:
            assert choice == Choice(context * COST.cached * SHAPE.kv_heads, 0.0, None)
            continue
        assert choice.bytes == sum(COST.total(*size) for size in choice.sizes)
        assert len(choice.sizes) == SHAPE.kv_heads
        assert per_head or len(set(choice.sizes)) == 1
        losses = _losses(one, SHAPE)
        assert choice.loss == pytest.approx(sum(losses[size][head] for head, size in enumerate(choice.sizes)))
    even = choose([curve(one.name) for one in curves], shapes, total, per_head=False)
    spent = {one.name: even[one.name].bytes / SHAPE.kv_heads for one in curves}
    even_loss = sum(one.effects[h] * one.error(h, 0.7, spent[one.name]) for one in curves for h in range(2))
    # Sizes are whole tokens, so the best choice can miss the relaxation's by a step.
    assert total_loss(chosen) <= even_loss * 1.1 + 1e-9


def test_a_cache_is_paid_for_in_the_models_dtype_whatever_tokens_are_kept_in():
    shape = Shape(2, HeadCost.of(8, 8, 4, "int8"))
    assert (shape.cost.token, shape.cost.cached) == (18, 64)
    chosen = choose([curve("a", (1e4, 1e4))], {"a": shape}, 2 * 40 * 64, context=40)
    assert chosen["a"] == Choice(2 * 40 * 64, 0.0, None)
    assert choose([curve("a", (1e4, 1e4))], {"a": shape}, 2 * 40 * 64 - 1, context=40)["a"].sizes is not None


@st.composite
def ragged(draw):
    """A layer of up to four heads, each with an effect and an error curve of its own, and its shape."""
    kv_heads = draw(st.integers(1, 4))
    each = {"min_size": kv_heads, "max_size": kv_heads}
    effects, levels = (draw(st.lists(st.floats(0.01, 100), **each)) for _ in range(2))
    powers = draw(st.lists(st.floats(0.1, 2), **each))
    kept_as = draw(st.sampled_from(["int8", "model"]))
    return curve("a", effects, levels, powers), Shape(kv_heads, HeadCost.of(8, 8, 4, kept_as))


@quick
@given(layer=ragged())
def test_a_layer_has_at_most_two_sizes_of_heads_and_says_what_they_cost_and_lose(layer):
    one, shape = layer
    losses, hull = _losses(one, shape), best_sizes(one, shape)
    for choice in hull:
        assert len(choice.sizes) == shape.kv_heads
        assert len(set(choice.sizes)) <= 2
        assert choice.bytes == sum(shape.cost.total(*size) for size in choice.sizes)
        assert choice.loss == pytest.approx(sum(losses[size][head] for head, size in enumerate(choice.sizes)))
    slopes = [(a.loss - b.loss) / (b.bytes - a.bytes) for a, b in itertools.pairwise(hull)]
    assert all(slope > 0 for slope in slopes)
    assert slopes == sorted(slopes, reverse=True)


def least(choices, price):
    """The smallest loss if a byte costs ``price``, its bytes paid for."""
    return min(choice.loss + price * choice.bytes for choice in choices)


@quick
@given(layer=ragged(), price=st.floats(1e-8, 1e-1))
def test_two_sizes_are_never_worse_than_one_for_all_heads(layer, price):
    one, shape = layer
    two_sizes, one_size = (best_sizes(one, shape, per_head=per_head) for per_head in (True, False))
    assert all(len(set(choice.sizes)) == 1 for choice in one_size)
    assert least(two_sizes, price) <= least(one_size, price) * (1 + 1e-12)
    # Nor are they better than a size for each head could be.
    alone = 0.0
    for head in range(shape.kv_heads):
        alone += min(own[head] + price * shape.cost.total(*size) for size, own in _losses(one, shape).items())
    assert alone <= least(two_sizes, price) * (1 + 1e-12)


@quick
@given(
    kinds=st.lists(st.booleans(), min_size=1, max_size=5),
    effects=st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)),
    powers=st.tuples(st.floats(0.1, 2), st.floats(0.1, 2)),
    price=st.floats(1e-8, 1e-1),
)
def test_for_two_kinds_of_heads_two_sizes_are_as_good_as_one_for_each(kinds, effects, powers, price):
    one = curve("a", [effects[kind] for kind in kinds], power=[powers[kind] for kind in kinds])
    shape, losses = Shape(len(kinds), COST), _losses(one, Shape(len(kinds), COST))
    alone = [min(own[head] + price * COST.total(*size) for size, own in losses.items()) for head in range(len(kinds))]
    assert least(best_sizes(one, shape), price) == pytest.approx(sum(alone))


@quick
@given(
    layers=st.lists(ragged(), min_size=1, max_size=3),
    budget=st.integers(1, 30),
    context=st.sampled_from([None, 10, 200]),
)
def test_the_whole_choice_is_as_good_as_with_one_size_per_layer_but_for_a_step(layers, budget, context):
    curves = [LayerCurve(str(n), one.effects, one.points) for n, (one, _) in enumerate(layers)]
    shapes = {str(n): shape for n, (_, shape) in enumerate(layers)}
    total = sum(220 * shape.kv_heads * budget for shape in shapes.values())
    chosen, even = (choose(curves, shapes, total, context, per_head=per_head) for per_head in (True, False))
    assert sum(choice.bytes for choice in chosen.values()) <= total
    # What the relaxation would take a part of may not fit as a whole.
    hulls = [best_sizes(one, shapes[one.name], context) for one in curves]
    step = max((a.loss - b.loss for hull in hulls for a, b in itertools.pairwise(hull)), default=0)
    assert total_loss(chosen) <= total_loss(even) + step + 1e-9


def test_a_step_to_softmax_that_does_not_fit_hides_no_smaller_ones():
    # The straight line to a cache that costs more than there is passes below all sizes but the smallest.
    one = curve("a", power=0.125)
    cache = 15 * COST.cached * SHAPE.kv_heads
    assert [choice.sizes is None for choice in best_sizes(one, SHAPE, 15)] == [False, True]
    assert choose([one], {"a": SHAPE}, cache - 1, context=15) == choose([one], {"a": SHAPE}, cache - 1)
    assert choose([one], {"a": SHAPE}, cache, context=15)["a"] == Choice(cache, 0.0, None)


def test_a_cache_may_be_all_that_fits():
    cache = COST.cached * SHAPE.kv_heads
    assert choose([curve("a")], {"a": SHAPE}, cache, context=1)["a"] == Choice(cache, 0.0, None)
    for context, least in ((1, cache), (None, ".*")):
        with pytest.raises(DoflaError, match=f"take {least} bytes together, the budget is 100: measure the curves"):
            choose([curve("a")], {"a": SHAPE}, 100, context=context)


def test_the_hull_is_convex_and_falls():
    points = ((1, 9.0), (2, 8.5), (3, 4.0), (4, 4.5), (5, 3.0), (9, 2.9))
    assert [choice.bytes for choice in lower_hull([Choice(*point, None) for point in points])] == [1, 3, 5, 9]


def test_curves_are_read_as_they_were_written(tmp_path):
    curves = Curves([curve("a", (2.0, 0.5)), curve("b", (1.0,))], "teacher", {"steps": 3})
    curves.save(tmp_path / "curves.json")
    assert Curves.load(tmp_path / "curves.json") == curves
    assert json.loads((tmp_path / "curves.json").read_text())["format"] == 2


def layers(effects=(1.0, 2.0), more=(), **changes):
    """Layers of a file, with a point that is off."""
    points = [{"share": 0.7, "bytes": 9, "errors": [0.1, 0.2]} | changes, *more]
    return {"layers": [{"name": "a", "effects": effects, "points": points}]}


@pytest.mark.parametrize(
    "damage",
    [
        {"layers": []},
        {"layers": [{"name": "a"}]},
        {"layers": [{"name": "a", "effect": 1.0, "points": [{"share": 0.7, "bytes": 9, "error": 0.3}]}]},  # format 1
        {"layers": [{"name": "a", "effects": [1.0, 2.0], "points": []}]},
        layers(effects="much"),
        layers(effects=["1.0", 2.0]),
        layers(effects=[float("inf"), 1.0]),
        layers(effects=[]),
        layers(effects=[1.0, 2.0, 3.0]),
        layers(more=[{"share": 0.7, "bytes": 20, "errors": [0.1]}]),
        layers(bytes=0),
        layers(share=1.5),
        layers(errors=[0.1, float("nan")]),
        layers(errors=None),
        layers(errors=[0.1]),
        layers(color="red"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, damage):
    path = tmp_path / "curves.json"
    Curves([curve("a")], "teacher").save(path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | layers()))
    assert len(Curves.load(path).layers) == 1
    path.write_text(json.dumps(data | damage))
    with pytest.raises(DoflaError, match=r"curves\.json holds no error curves .*measure them again"):
        Curves.load(path)


@pytest.mark.parametrize("format", [1, 3])
def test_curves_of_another_format_are_to_be_measured_again(tmp_path, format):
    points = [{"share": 0.73, "bytes": 100, "error": 0.3}, {"share": 0.73, "bytes": 400, "error": 0.1}]
    layers = [{"name": "a", "effect": 1.0, "points": points}]
    data = {"format": format, "layers": layers, "model": "teacher", "made_by": {}}
    (tmp_path / "old.json").write_text(json.dumps(data))
    with pytest.raises(DoflaError, match=rf"old\.json holds no error curves .*format {format}, .*: measure them again"):
        Curves.load(tmp_path / "old.json")
