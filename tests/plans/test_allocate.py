"""Algorithm 1 and its relatives, in whole numbers, within the budget."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dofla
from dofla.errors import DoflaError
from dofla.feature_maps.cost import HeadCost
from dofla.integration.surgery import even_plan
from dofla.linear import allocate
from dofla.plans.allocate import STRATEGIES
from dofla.plans.curves import Curves, LayerCurve, Point
from dofla.plans.hybrid import split
from dofla.plans.layers import SoftmaxLayer
from dofla.profiles.profile import LayerProfile, Profile, SkippedLayer
from dofla.profiles.spectrum import Spectrum

quick = settings(max_examples=40, derandomize=True)

# Table 1 of arXiv 2507.03340: dimensions selected for GPT-2 at an average of 64.
PAPER_GPT2 = [130, 182, 35, 44, 42, 65, 92, 33, 28, 34, 46, 39]


class KnownProfile(Profile):
    """A profile whose degrees of freedom [layer][KV head] are given."""

    def dof(self, lam=0.1, normalization=None):
        super().dof(lam, normalization)
        return self.known


def layer(number, shape=(1, 64, 64), causal=True):
    kv_heads, head_dim, value_dim = shape
    spectrum = Spectrum(torch.tensor([0.75, 0.25], dtype=torch.float64), 0.0)
    heads = [spectrum] * kv_heads
    return LayerProfile(f"layers.{number}", kv_heads, kv_heads, head_dim, value_dim, 0.125, causal, heads)


def known(rows, shapes=None, skipped=(), causal=True):
    """A profile with these degrees of freedom; ``shapes`` (kv_heads, head_dim, value_dim) of each layer."""
    rows = [row if isinstance(row, list) else [row] for row in rows]
    shapes = shapes or [(len(row), 64, 64) for row in rows]
    layers = [layer(number, shape, causal) for number, shape in enumerate(shapes)]
    profile = KnownProfile("teacher", layers, samples=8, tokens=8, source="here", seed=0, skipped=list(skipped))
    profile.known = rows
    return profile


def features(plan):
    return [x.features for x in plan.layers]


def numbers(plan):
    """Numbers of state, all of four bytes: where tokens are kept in the dtype of a model in float32."""
    total = plan.state_bytes()
    assert total % 4 == 0
    return total // 4


def allowed(profile, budget):
    """State of ``budget`` features in every layer."""
    return sum(budget * x.kv_heads * (x.value_dim + 2) for x in profile.layers)


dofs = st.floats(0.9, 300.0)
dims = st.sampled_from([1, 4, 16, 64, 128])


@st.composite
def profiles(draw, uniform=False, most=8):
    count = draw(st.integers(1, most))
    kv_heads, shape = draw(st.integers(1, 3)), (draw(dims), draw(dims))
    shapes = [
        (kv_heads, *shape) if uniform else (draw(st.integers(1, 3)), draw(dims), draw(dims)) for _ in range(count)
    ]
    return known([[draw(dofs) for _ in range(shape[0])] for shape in shapes], shapes)


@quick
@given(
    profile=profiles(),
    budget=st.integers(1, 200),
    strategy=st.sampled_from(sorted(STRATEGIES)),
    over_heads=st.sampled_from(["max", "mean", "q50"]),
    per_head=st.booleans(),
    window=st.integers(0, 5),
    sinks=st.integers(0, 3),
)
def test_no_plan_costs_more_than_its_budget_or_leaves_a_head_empty(
    profile, budget, strategy, over_heads, per_head, window, sinks
):
    tokens = sum((window + sinks) * x.kv_heads * (x.head_dim + x.value_dim) for x in profile.layers)
    options = {"over_heads": over_heads, "per_head": per_head, "window": window, "sinks": sinks}
    if allowed(profile, budget) - tokens < allowed(profile, 1):
        with pytest.raises(DoflaError, match=f"budget {budget} is too small"):
            allocate(profile, budget, strategy, **options)
        return
    plan = allocate(profile, budget, strategy, **options)
    assert numbers(plan) <= allowed(profile, budget)
    assert all(isinstance(count, int) and count >= 1 for x in plan.layers for count in x.features_per_head)
    assert per_head or all(isinstance(count, int) for count in features(plan))
    assert {(x.window, x.sinks) for x in plan.layers} == {(window, sinks)}


@quick
@given(profile=profiles(), budget=st.integers(1, 200), window=st.integers(0, 3), sinks=st.integers(0, 2))
def test_fixed_and_dof_buy_all_that_the_budget_buys(profile, budget, window, sinks):
    tokens = sum((window + sinks) * x.kv_heads * (x.head_dim + x.value_dim) for x in profile.layers)
    left = allowed(profile, budget) - tokens
    affordable = left // allowed(profile, 1)
    if affordable < 1:
        return
    assert set(features(allocate(profile, budget, "fixed", window=window, sinks=sinks))) == {affordable}
    spent = numbers(allocate(profile, budget, "dof", window=window, sinks=sinks))
    assert allowed(profile, budget - 1) <= spent <= allowed(profile, budget)


@quick
@given(profile=profiles(), budget=st.integers(1, 200))
def test_dof_is_proportional_within_rounding_even_if_layers_cost_differently(profile, budget):
    plan = allocate(profile, budget, "dof")
    dof = [max(row) for row in profile.known]
    costs = [x.kv_heads * (x.value_dim + 2) for x in profile.layers]
    factor = budget * sum(costs) / sum(n * cost for n, cost in zip(dof, costs, strict=True))
    if factor * min(dof) >= 1:
        assert all(abs(count - factor * n) < 1 + 1e-9 for count, n in zip(features(plan), dof, strict=True))


@quick
@given(profile=profiles(uniform=True), budget=st.integers(1, 200))
def test_clipped_dof_is_dof_cut_at_the_head_size(profile, budget):
    plan = allocate(profile, budget, "dof_clip")
    dof = [max(row) for row in profile.known]
    head_dim = profile.layers[0].head_dim
    shares = [min(head_dim, budget * len(dof) * n / sum(dof)) for n in dof]
    assert max(features(plan)) <= head_dim
    if min(shares) >= 1:
        assert all(abs(count - share) < 1 + 1e-9 for count, share in zip(features(plan), shares, strict=True))


def test_the_dimensions_the_paper_reports_come_out_within_the_budget_it_names():
    plan = allocate(known(PAPER_GPT2), 64, "dof")
    # The published numbers add up to 770, two above the budget of 768.
    assert sum(features(plan)) == 64 * 12
    differences = [ours - theirs for ours, theirs in zip(features(plan), PAPER_GPT2, strict=True)]
    assert sorted(differences) == [-1, -1] + [0] * 10
    clipped = allocate(known(PAPER_GPT2), 64, "dof_clip")
    assert features(clipped) == [min(64, count) for count in PAPER_GPT2]


@pytest.mark.parametrize(
    ("over_heads", "expected"), [("max", [12, 4]), ("mean", [8, 8]), ("q100", [12, 4]), ("q75", [10, 6])]
)
def test_a_layers_number_comes_from_its_heads(over_heads, expected):
    profile = known([[9.0, 0.0, 0.0], [3.0, 3.0, 3.0]])
    assert features(allocate(profile, 8, "dof", over_heads=over_heads)) == expected


def test_with_per_head_each_head_gets_its_own_share_of_the_same_budget():
    profile = known([[9.0, 1.0, 2.0], [4.0, 4.0, 4.0]])
    plan = allocate(profile, 8, "dof", per_head=True)
    assert features(plan) == [[18, 2, 4], 8]
    assert numbers(plan) == numbers(allocate(profile, 8, "dof"))
    clipped = allocate(known([[90.0, 10.0], [50.0, 50.0]]), 50, "dof_clip", per_head=True)
    assert features(clipped) == [[64, 10], 50]
    assert features(allocate(profile, 8, "fixed", per_head=True)) == [8, 8]


def test_layers_kept_softmax_take_no_part():
    profile = known([5.0, 1.0, 3.0], skipped=[SkippedLayer("odd", 2, 16, 8, "asked for")])
    plan = allocate(profile, 16, "dof", keep_softmax=["layers.0", "odd"])
    kept = {x.name: isinstance(x, SoftmaxLayer) for x in plan.layers}
    assert kept == {"layers.0": True, "layers.1": False, "layers.2": False, "odd": True}
    assert [plan[f"layers.{n}"].features for n in (1, 2)] == [8, 24]
    assert (plan["odd"].kv_heads, plan["odd"].head_dim, plan["odd"].value_dim) == (2, 16, 8)
    assert allocate(profile, 16, "dof", keep_softmax=[x.name for x in profile.layers]).state_bytes() == 0


def test_the_plan_records_how_it_was_made():
    plan = allocate(known([1.0, 2.0]), 32, "dof_clip", lam=0.5, over_heads="mean", normalization="top")
    assert plan.model == "teacher"
    options = {"over_heads": "mean", "per_head": False, "normalization": "top"}
    assert plan.made_by == {"strategy": "dof_clip", "budget": 32, "lambda": 0.5, **options}
    assert allocate(known([1.0]), 4, "dof").made_by["normalization"] == "trace"


def test_lambda_and_normalization_reach_the_spectra():
    flat, steep = (torch.tensor(values, dtype=torch.float64) for values in ([1.0] * 8, [1.0] + [0.01] * 7))
    layers = [layer(0), layer(1)]
    layers[0].spectra, layers[1].spectra = [Spectrum(flat, 0.0)], [Spectrum(steep, 0.0)]
    profile = Profile("teacher", layers, samples=8, tokens=8, source="here", seed=0)
    for lam, normalization in ((1e-3, "trace"), (0.1, "top")):
        dof = [row[0] for row in profile.dof(lam, normalization)]
        got = features(allocate(profile, 500, "dof", lam=lam, normalization=normalization))
        assert got[0] == pytest.approx(1000 * dof[0] / sum(dof), abs=1)
        assert sum(got) == 1000
    assert features(allocate(profile, 500, "dof", lam=1e-3)) != features(allocate(profile, 500, "dof", lam=0.1))


def sizes(plan):
    return [None if isinstance(x, SoftmaxLayer) else (x.features, x.window, x.sinks) for x in plan.layers]


def head_cost(layer, itemsize, token_dtype="int8"):
    return HeadCost.of(layer.head_dim, layer.value_dim, itemsize, token_dtype)


def spent(profile, plan, itemsize, context=0):
    """Bytes of state; layers that stayed softmax at the price of ``context`` tokens."""
    total = 0
    for layer, x in zip(profile.layers, plan.layers, strict=True):
        if isinstance(x, SoftmaxLayer):
            total += layer.kv_heads * context * itemsize * (layer.head_dim + layer.value_dim)
        else:
            cost = head_cost(layer, itemsize, x.token_dtype)
            total += sum(cost.total(*size) for size in x.sizes)
    return total


def budget_bytes(profile, budget):
    return allowed(profile, budget) * 4


def curves_for(profile, budget, effects=None, itemsize=4, levels=(0.25, 1.0, 4.0), token_dtype="int8", heads=(1.0,)):
    """Curves whose errors fall with the bytes, faster in some layers than in others; ``heads`` is what the effects of
    KV heads are multiplied with, in turn."""
    curves = []
    for n, x in enumerate(profile.layers):
        cost, of_heads = head_cost(x, itemsize, token_dtype), range(x.kv_heads)
        tried = [
            (share, cost.total(*split(round(level * budget * cost.feature), cost, share)))
            for share in (0.5, 0.73, 0.9)
            for level in levels
        ]
        errors = [(1 + (share - 0.73) ** 2) * size ** -(0.3 + 0.2 * n) for share, size in tried]
        points = [Point(*size, [error] * x.kv_heads) for size, error in zip(tried, errors, strict=True)]
        effect = 1.0 if effects is None else effects[n]
        curves.append(LayerCurve(x.name, [effect * heads[head % len(heads)] for head in of_heads], points))
    return Curves(curves, "teacher", {"budget": budget, "token_dtype": token_dtype})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_hybrid_is_the_even_plan_of_a_model_of_that_dtype(tiny, dtype, family):
    model = getattr(tiny, family)().to(dtype)
    profile = dofla.linear.profile(model, tiny.tokens(2, 16), samples=8)
    for budget in (1, 8, 64):
        plan = allocate(profile, budget)
        assert plan.layers == even_plan(model, budget).layers
        assert plan.made_by == {"strategy": "hybrid", "budget": budget}


@quick
@given(
    profile=profiles(),
    budget=st.integers(1, 200),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    token_dtype=st.sampled_from([None, "int8", "model"]),
)
def test_hybrid_stays_within_the_budget_in_every_layer(profile, budget, dtype, token_dtype):
    profile.dtype = dtype
    itemsize = getattr(torch, dtype).itemsize
    plan = allocate(profile, budget, token_dtype=token_dtype)
    for x, layer in zip(plan.layers, profile.layers, strict=True):
        assert x.token_dtype == (token_dtype or "int8")
        cost = head_cost(layer, itemsize, x.token_dtype)
        assert (x.features, x.window, x.sinks) == split(budget * cost.feature, cost)
    assert spent(profile, plan, itemsize) == plan.state_bytes(getattr(torch, dtype)) <= budget_bytes(profile, budget)


@quick
@given(
    profile=profiles(),
    budget=st.integers(1, 200),
    window=st.integers(0, 5),
    sinks=st.integers(0, 3),
    token_dtype=st.sampled_from(["int8", "model"]),
)
def test_hybrid_with_a_window_of_ones_own_spends_the_rest_on_features(profile, budget, window, sinks, token_dtype):
    tokens = sum((window + sinks) * x.kv_heads * head_cost(x, 4, token_dtype).token for x in profile.layers)
    options = {"window": window, "sinks": sinks, "token_dtype": token_dtype}
    if budget_bytes(profile, budget) - tokens < budget_bytes(profile, 1):
        with pytest.raises(DoflaError, match="too small for one feature per layer"):
            allocate(profile, budget, **options)
        return
    plan = allocate(profile, budget, **options)
    assert {(x.window, x.sinks) for x in plan.layers} == {(window, sinks)}
    assert {x.feature_map for x in plan.layers} == {"mlp"}
    assert set(features(plan)) == {(budget_bytes(profile, budget) - tokens) // budget_bytes(profile, 1)}
    assert features(plan) == features(allocate(profile, budget, "fixed", **options))


def test_a_profile_in_bfloat16_buys_twice_the_tokens_in_its_dtype_and_as_many_in_eight_bits():
    profile = known([1.0, 2.0])
    counts = {}
    for token_dtype in ("model", "int8"):
        whole, half = (allocate(x, 64, token_dtype=token_dtype) for x in (profile, of_dtype(profile, "bfloat16")))
        counts[token_dtype] = [[x.window + x.sinks for x in plan.layers] for plan in (whole, half)]
        assert features(whole) == features(half)
    # 130 bytes instead of 256 and 512.
    assert counts == {"model": [[24, 24], [48, 48]], "int8": [[95, 95], [95, 95]]}
    # The paper's features are paid for in the same coin.
    plans = [allocate(x, 32, "fixed", window=3, sinks=1) for x in (profile, of_dtype(profile, "bfloat16"))]
    assert [features(plan)[0] for plan in plans] == [32 - math.ceil(512 / 66), 32 - math.ceil(256 / 66)]
    plan = allocate(profile, 32, "fixed", window=3, sinks=1, token_dtype="int8")
    assert features(plan) == [32 - math.ceil(4 * 130 / 4 / 66)] * 2


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("strategy", ["hybrid", "fixed", "dof", "dof_clip"])
def test_exact_tokens_are_kept_in_eight_bits_unless_the_layer_keeps_nothing_or_is_the_papers(strategy, causal):
    profile = known([1.0, 2.0], causal=causal)
    expected = "int8" if strategy == "hybrid" and causal else "model"
    assert {x.token_dtype for x in allocate(profile, 16, strategy).layers} == {expected}
    for token_dtype in ("int8", "model"):
        for exact in ({}, {"window": 2, "sinks": 1}):
            plan = allocate(profile, 16, strategy, token_dtype=token_dtype, **exact)
            assert {x.token_dtype for x in plan.layers} == {token_dtype}


@pytest.mark.parametrize(("measured", "asked"), [("int8", "model"), ("model", "int8"), (None, "int8")])
def test_tokens_are_kept_as_the_curves_were_measured_or_refused(measured, asked):
    profile = known([1.0, 2.0])
    curves = curves_for(profile, 16, token_dtype=measured or "model")
    if measured is None:
        del curves.made_by["token_dtype"]
    for same in (None, measured):
        plan = allocate(profile, 16, "measured", curves=curves, token_dtype=same)
        assert {x.token_dtype for x in plan.layers} == {measured or "model"}
    words = f"token_dtype is '{asked}', the error curves were measured with '{measured or 'model'}': measure them"
    with pytest.raises(DoflaError, match=words):
        allocate(profile, 16, "measured", curves=curves, token_dtype=asked)


def of_dtype(profile, dtype):
    other = known(profile.known)
    other.dtype = dtype
    return other


def test_hybrid_layers_default_to_mlp_and_the_papers_to_prf():
    profile = known([1.0, 2.0])
    curves = curves_for(profile, 8)
    for strategy, expected in (("hybrid", "mlp"), ("measured", "mlp"), ("fixed", "prf"), ("dof", "prf")):
        options = {"curves": curves} if strategy == "measured" else {}
        for name, found in ((None, expected), ("exponential", "exponential")):
            plan = allocate(profile, 8, strategy, name, **options)
            assert {x.feature_map for x in plan.layers} == {found}
            assert plan.made_by["strategy"] == strategy


@quick
@given(
    profile=profiles(most=4),
    budget=st.integers(4, 100),
    effects=st.lists(st.floats(0.01, 100), min_size=4, max_size=4),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    token_dtype=st.sampled_from(["int8", "model"]),
    context=st.sampled_from([None, 1, 30, 500]),
    heads=st.lists(st.floats(0.1, 10), min_size=3, max_size=3),
    per_head=st.sampled_from([None, True, False]),
)
def test_a_measured_plan_stays_within_the_budgets_bytes(
    profile, budget, effects, dtype, token_dtype, context, heads, per_head
):
    profile.dtype, itemsize = dtype, getattr(torch, dtype).itemsize
    curves = curves_for(profile, budget, effects, itemsize, token_dtype=token_dtype, heads=heads)
    plan = allocate(profile, budget, "measured", curves=curves, context=context, per_head=per_head)
    assert spent(profile, plan, itemsize, context) <= budget_bytes(profile, budget)
    assert context is not None or not any(isinstance(x, SoftmaxLayer) for x in plan.layers)
    for x in plan.linear:
        assert min(x.features_per_head) >= 1
        assert len(set(x.sizes)) <= (1 if per_head is False else 2)
        assert x.token_dtype == token_dtype
        # A number for each head only where they differ.
        for what, each in zip(("features", "window", "sinks"), zip(*x.sizes, strict=True), strict=True):
            assert getattr(x, what) == (list(each) if len(set(each)) > 1 else each[0])


def test_what_a_layer_does_to_the_model_decides_its_bytes():
    profile = known([1.0, 1.0, 1.0])
    plan = allocate(profile, 32, "measured", curves=curves_for(profile, 32, [1.0, 1.0, 1e4]))
    tokens = [x.features + x.window for x in plan.layers]
    assert tokens[2] > 1.5 * max(tokens[:2])


def test_what_a_head_does_to_the_model_decides_its_bytes():
    profile = known([[1.0] * 4, [1.0] * 4])
    curves = curves_for(profile, 32, heads=(1.0, 100.0, 1.0, 100.0))
    plan = allocate(profile, 32, "measured", curves=curves)
    for x in plan.layers:
        assert x.sizes[0] == x.sizes[2]
        assert x.sizes[1] == x.sizes[3]
        assert x.cost(4).total(*x.sizes[1]) > 2 * x.cost(4).total(*x.sizes[0])
    same = allocate(profile, 32, "measured", curves=curves, per_head=False)
    assert all(len(set(x.sizes)) == 1 for x in same.layers)
    assert [p.made_by["per_head"] for p in (plan, same)] == [True, False]


def test_with_a_context_layers_may_stay_softmax():
    profile = known([1.0, 1.0, 1.0])
    curves = curves_for(profile, 32, [1e-3, 1e-3, 1e4])
    without = allocate(profile, 32, "measured", curves=curves)
    assert None not in sizes(without)
    assert without.made_by == {"strategy": "measured", "budget": 32, "per_head": True, "context": None}
    # A cache of 30 tokens takes 15 KiB of the 25 KiB there are.
    plan = allocate(profile, 32, "measured", curves=curves, context=30)
    assert [size is None for size in sizes(plan)] == [False, False, True]
    assert plan.made_by["context"] == 30
    assert sizes(allocate(profile, 32, "measured", curves=curves, context=100_000)) == sizes(without)


def test_measured_looks_at_the_layers_that_are_to_be_linear():
    profile = known([5.0, 1.0, 3.0], skipped=[SkippedLayer("odd", 2, 16, 8, "asked for")])
    curves = curves_for(profile, 16)
    fewer, reverse = (dataclasses.replace(curves, layers=x) for x in (curves.layers[1:], curves.layers[::-1]))
    plan = allocate(profile, 16, "measured", curves=fewer, keep_softmax=["layers.0", "odd"])
    assert [size is None for size in sizes(plan)] == [True, False, False, True]
    every, backwards = (allocate(profile, 16, "measured", curves=x) for x in (curves, reverse))
    assert sizes(every) == sizes(backwards)
    nothing = allocate(profile, 16, "measured", curves=curves, keep_softmax=[f"layers.{n}" for n in range(3)])
    assert sizes(nothing) == [None] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"curves": None}, "strategy measured goes by error curves: give curves="),
        ({"window": 4}, "strategy measured chooses window and sinks itself"),
        ({"sinks": 0}, "strategy measured chooses window and sinks itself"),
        ({"budget": 1}, "the smallest layers that were measured take .* measure the curves at this budget"),
        ({"context": 0}, "context is 0: give an integer number of tokens, 1 or more"),
        (
            {"curves": Curves([LayerCurve("layers.0", [1.0], [Point(0.73, 1000, [0.1])])])},
            "the error curves say nothing of layer layers.1: they are of another model; measure them",
        ),
        (
            {"curves": Curves([LayerCurve(f"layers.{n}", [1.0] * 2, [Point(0.73, 1000, [0.1] * 2)]) for n in (0, 1)])},
            "the error curves of layer layers.0 are of 2 KV heads, not 1: they are of another model; measure them",
        ),
    ],
)
def test_what_measured_cannot_do_is_one_line_with_the_way_out(options, message):
    profile = known([1.0, 2.0])
    options = {"budget": 64, "curves": curves_for(profile, 64)} | options
    with pytest.raises(DoflaError, match=message):
        allocate(profile, strategy="measured", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lam": 0.0}, "lambda is 0.0"),
        ({"lam": math.nan}, "lambda is nan"),
        ({"token_dtype": "int4"}, "unknown token_dtype 'int4': choose one of int8, model"),
        ({"strategy": "best"}, "unknown strategy 'best': choose one of dof, dof_clip, fixed, hybrid, measured"),
        ({"feature_map": "magic"}, "unknown feature map 'magic': choose one of .*prf"),
        ({"over_heads": "median"}, "unknown over_heads 'median': choose max, mean, or a quantile"),
        ({"normalization": "unit"}, "unknown normalization 'unit': choose one of trace, top, mean, none"),
        ({"per_head": True}, "per_head given with strategy hybrid, which has one size for all"),
        ({"keep_softmax": ["layers.9"]}, r"keep_softmax names 'layers.9'.*layers\.0"),
        ({"budget": 0}, "budget 0 is too small"),
        ({"budget": 12.5}, "budget is 12.5"),
        ({"window": -1}, "window is -1"),
        ({"sinks": 0.5}, "sinks is 0.5"),
        ({"budget": 4, "window": 2, "token_dtype": "model"}, "is too small .* after a window of 2 and 0 sinks"),
        ({"budget": 4, "window": 5, "sinks": 2}, "budget 4 is too small .* after a window of 5 and 2 sinks"),
    ],
)
def test_a_bad_option_is_one_line_with_the_way_out(options, message):
    with pytest.raises(DoflaError, match=message):
        allocate(known([1.0, 2.0]), **options)
