"""Error curves of tiny models: what is tried, what it is compared with, and that the teacher comes back untouched."""

import copy
from types import SimpleNamespace

import pytest
import torch
from students import everything
from torch.testing import assert_close

import dofla
from dofla.distillation import measure_curves, trials
from dofla.distillation.fidelity import attention_fidelity
from dofla.errors import DoflaError
from dofla.integration.converted import Converted, is_converted
from dofla.integration.recorder import run_body
from dofla.integration.sites import attention_sites
from dofla.integration.surgery import answering, even_plan
from dofla.plans.curves import Curves
from dofla.plans.hybrid import TOKEN_SHARE, HeadCost, split

BUDGET, WINDOWS, LENGTH, HELD_OUT = 8, 5, 24, 2
OPTIONS = {"steps": 1, "batch_size": 2, "rows": 8, "held_out": HELD_OUT}
SIZES = [(TOKEN_SHARE, level) for level in trials.LEVELS]
SIZES += [(share, level) for share in trials.OTHER_SHARES for level in (0.15, 1.0, 6.0)]


def data(tiny, family):
    if family == "vit":
        return tiny.images(WINDOWS)
    return tiny.padded(WINDOWS, LENGTH) if family == "bert" else tiny.tokens(WINDOWS, LENGTH)


def measured(tiny, family="llama", model=None, **options):
    model = getattr(tiny, family)() if model is None else model
    return measure_curves(model, data(tiny, family), BUDGET, **OPTIONS | options)


def cost_of(site, itemsize=4, token_dtype=None):
    token_dtype = token_dtype or ("int8" if site.causal else "model")
    return HeadCost.of(site.head_dim, site.value_dim, itemsize, token_dtype)


def size_of(cost, share, level):
    """(features, window, sinks) that are tried."""
    return split(round(max(1, level * BUDGET) * cost.feature), cost, share)


def spent(cost, share, level):
    """Bytes of a KV head at a size."""
    return cost.total(*size_of(cost, share, level))


@pytest.fixture(scope="module", params=["llama", "bert", "vit"])
def found(request, tiny):
    """Curves of a model of a family, and how they came about."""
    family, trained, stages = request.param, [], []
    model = getattr(tiny, family)()
    before = everything(model)

    def keep(student, windows, **options):
        assert len(windows) == WINDOWS - HELD_OUT
        assert options | {key: OPTIONS[key] for key in ("steps", "batch_size", "rows")} | {"seed": 5} == options
        dofla.linear.distill(student, windows, **options)
        layers = Converted.of(student).layers
        trained.append({name: copy.deepcopy(layer.state_dict()) for name, layer in layers.items()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "distill", keep)
        curves = measured(tiny, family, model, seed=5, progress=lambda *stage: stages.append(stage))
    assert everything(model) == before
    return SimpleNamespace(family=family, model=model, curves=curves, trained=trained, stages=stages)


def test_all_layers_are_measured_at_all_sizes(found):
    sites, longest = attention_sites(found.model), {"llama": LENGTH, "bert": 16, "vit": 17}[found.family]
    assert [curve.name for curve in found.curves.layers] == list(sites)
    for curve in found.curves.layers:
        site = sites[curve.name]
        expected = [(share, spent(cost_of(site), share, level)) for share, level in SIZES]
        assert [(point.share, point.bytes) for point in curve.points] == expected
        assert all(len(point.errors) == site.kv_heads for point in curve.points)
        for point, size in zip(curve.points, SIZES, strict=True):
            if size_of(cost_of(site), *size)[1] < longest or site.causal:
                assert all(0 < error < 20 for error in point.errors)
            else:  # all of so short a text is seen exactly
                assert point.errors == pytest.approx([0] * site.kv_heads, abs=1e-6)
        assert len(curve.effects) == site.kv_heads
        assert min(curve.effects) > 0
    assert [stage for stage in found.stages if stage[0] == "sizes"] == [("sizes", n + 1, 11) for n in range(11)]
    effects = [stage for stage in found.stages if stage[0] == "effects"]
    total = HELD_OUT * sum(site.kv_heads for site in sites.values())
    assert effects == [("effects", n + 1, total) for n in range(total)]


@pytest.mark.parametrize("token_dtype", [None, "model"])
def test_the_curves_say_how_they_were_measured(tiny, tmp_path, token_dtype):
    model = tiny.llama()
    model.config._name_or_path = "a/teacher"
    curves = measured(tiny, model=model, feature_map="exponential", token_dtype=token_dtype, seed=3)
    assert curves.model == "a/teacher"
    expected = OPTIONS | {"budget": BUDGET, "feature_map": "exponential", "seed": 3, "tokens": WINDOWS * LENGTH}
    assert curves.made_by == expected | {"source": "tensor", "token_dtype": token_dtype or "int8"}
    curves.save(tmp_path / "curves.json")
    assert Curves.load(tmp_path / "curves.json") == curves


@pytest.mark.slow
def test_more_bytes_lose_less(tiny):
    curves = measured(tiny, steps=20)
    for curve in curves.layers:
        for share in (TOKEN_SHARE, *trials.OTHER_SHARES):
            points = [point for point in curve.points if point.share == share]
            assert all(less < more for less, more in zip(points[-1].errors, points[0].errors, strict=True))


@pytest.mark.slow
def test_the_same_seed_measures_the_same_and_another_something_else(tiny):
    assert measured(tiny) == measured(tiny)
    assert measured(tiny).layers != measured(tiny, seed=1).layers


def test_layers_kept_softmax_are_left_out(tiny):
    names = list(attention_sites(tiny.llama()))
    fewest = tiny.tokens(2 + HELD_OUT, LENGTH)
    curves = measure_curves(tiny.llama(), fewest, BUDGET, **OPTIONS, keep_softmax=[names[0]])
    assert [curve.name for curve in curves.layers] == names[1:]
    with pytest.raises(DoflaError, match=r"keep_softmax names 'odd', .* it has model\.layers\.0\.self_attn"):
        measured(tiny, keep_softmax=["odd"])


@pytest.mark.parametrize("token_dtype", ["model", "int8"])
def test_tokens_of_a_half_precision_model_cost_half_unless_they_are_kept_in_eight_bits(tiny, token_dtype):
    model = tiny.llama().bfloat16()
    first, *_ = curves = measured(tiny, model=model, token_dtype=token_dtype).layers
    half, whole = (cost_of(attention_sites(model)[first.name], itemsize, token_dtype) for itemsize in (2, 4))
    assert [point.bytes for point in first.points] == [spent(half, share, level) for share, level in SIZES]
    assert all(effect > 0 for curve in curves for effect in curve.effects)
    assert (half.token == whole.token) == (token_dtype == "int8")


def harm(teacher, student, family, batch):
    """What the student's answer to a batch is off by."""
    with torch.no_grad():
        if family == "llama":
            wanted, found = (torch.log_softmax(m(**batch).logits.double(), -1) for m in (teacher, student))
            return (wanted.exp() * (wanted - found)).sum(-1).mean()
        wanted, found = (run_body(m, batch).last_hidden_state.double() for m in (teacher, student))
    if family == "bert":
        real = batch["attention_mask"].bool()
        wanted, found = wanted[real], found[real]
    return (wanted - found).square().sum() / wanted.square().sum()


def test_points_and_effects_are_those_of_students_made_for_it(tiny, found):
    family, model, middle = found.family, found.model, SIZES.index((TOKEN_SHARE, 1.0))
    plan, trained = even_plan(model, BUDGET), found.trained[middle]
    whole = dofla.linear.linearize(copy.deepcopy(model), plan)
    for name, layer in Converted.of(whole).layers.items():
        layer.load_state_dict(trained[name])
    windows = dofla.data.as_windows(data(tiny, family))
    last = range(WINDOWS - HELD_OUT, WINDOWS)
    judging = dofla.data.as_windows(windows.batch(last))
    errors = attention_fidelity(Converted.of(whole), judging, batch_size=2, seed=5)
    for curve in found.curves.layers:
        own = errors[curve.name].head_kl
        assert curve.points[middle].errors == pytest.approx(own, rel=1e-6)
        for head, error in enumerate(own):
            with answering(whole, {curve.name: [head]}):
                harms = [harm(model, whole, family, windows.batch([n])) for n in last]
            expected = torch.stack(harms).mean() / error
            assert_close(torch.tensor(curve.effects[head]), expected.float(), rtol=1e-3, atol=1e-6)


def test_a_head_that_nothing_listens_to_does_no_harm(tiny):
    model, deaf = tiny.llama(), 1
    first, second = attention_sites(model)
    with torch.no_grad():
        model.get_submodule(first).o_proj.weight[:, deaf * 16 : (deaf + 1) * 16] = 0  # two query heads of eight
    curves = {curve.name: curve.effects for curve in measured(tiny, model=model).layers}
    assert abs(curves[first][deaf]) < 1e-6
    assert min(curves[first][1 - deaf], *curves[second]) > 1e-3


def test_dropout_plays_no_part_and_training_mode_stays(tiny):
    calm = measured(tiny, model=tiny.llama(attention_dropout=0.5))
    model = tiny.llama(attention_dropout=0.5).train()
    assert measured(tiny, model=model) == calm
    assert all(module.training for module in model.modules())


class Broken(Exception):
    pass


@pytest.mark.parametrize(("where", "call"), [("distill", 3), ("attention_fidelity", 1), ("_answer", 1), ("_answer", 4)])
def test_a_failure_half_way_leaves_the_model_as_it_was(tiny, monkeypatch, where, call):
    model, calls, before = tiny.llama(), [], everything(tiny.llama())
    original = getattr(trials, where)

    def fail(*arguments, **options):
        calls.append(1)
        if len(calls) == call:
            raise Broken
        return original(*arguments, **options)

    monkeypatch.setattr(trials, where, fail)
    with pytest.raises(Broken):
        measured(tiny, model=model)
    assert len(calls) == call
    assert not is_converted(model)
    assert everything(model) == before


def test_too_few_windows_are_refused(tiny):
    for count in (1, 3):
        with pytest.raises(DoflaError, match=f"{count} windows are too few for error curves: give 4 or more"):
            measure_curves(tiny.llama(), tiny.tokens(count, LENGTH), BUDGET, **OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0}, "budget 0 is too small for one feature per layer: give 1 or more"),
        ({"feature_map": "magic"}, "unknown feature map 'magic'"),
        ({"token_dtype": "int4"}, "token_dtype is 'int4': choose one of int8, model"),
        ({"feature_map": "performer"}, "nothing to train"),
        ({"steps": 0}, "steps is 0"),
        ({"rows": 0}, "rows is 0"),
    ],
)
def test_a_bad_option_is_one_line_and_leaves_the_model_alone(tiny, options, message):
    model, before = tiny.llama(), everything(tiny.llama())
    with pytest.raises(DoflaError, match=message):
        measure_curves(model, tiny.tokens(WINDOWS, LENGTH), **{"budget": BUDGET} | OPTIONS | options)
    assert everything(model) == before


def test_a_linearized_model_is_refused_and_stays_so(tiny):
    student = dofla.linear.linearize(tiny.llama(), budget=BUDGET)
    with pytest.raises(DoflaError, match="converted already"):
        measured(tiny, model=student)
    assert is_converted(student)
