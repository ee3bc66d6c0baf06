"""Students of a recipe that need error curves, and how their features start."""

import json

import pytest

import dofla
from dofla.data import TokenWindows
from dofla.errors import DoflaError
from dofla.feature_maps.cost import HeadCost
from dofla.integration.converted import Converted, is_converted
from dofla.plans.curves import Curves
from dofla.plans.hybrid import split
from dofla.plans.layers import SoftmaxLayer
from dofla.plans.plan import Plan
from dofla.runs import distillation, opened
from dofla.runs.distillation import Students
from dofla.runs.recipe import Recipe
from dofla.runs.run import run

BUDGET = 8
FIRST, SECOND = "model.layers.0.self_attn", "model.layers.1.self_attn"
CURVES = {"windows": 4, "steps": 1, "batch_size": 2, "rows": 8, "held_out": 2}
CHANGES = [f"budget={BUDGET}", "seeds=[0, 1]", "distill.steps=1", "distill.rows=8", "evaluate.prompts=0"]
CHANGES += ["profile.samples=32", "profile.windows=4", *(f"curves.{name}={value}" for name, value in CURVES.items())]


@pytest.fixture
def measurements(tiny, monkeypatch):
    """A tiny teacher for every recipe; the calls of ``measure_curves`` are listed, as (budget, options)."""
    model, tokens, calls = tiny.llama(), TokenWindows.of(tiny.tokens(12, 24)), []

    def measure(teacher, windows, budget, **options):
        calls.append((budget, options | {"windows": len(windows)}))
        return dofla.linear.measure_curves(teacher, windows, budget, **options)

    monkeypatch.setattr(opened, "open_original", lambda *_: (model, None))
    monkeypatch.setattr(opened, "windows_of", lambda *_, **__: tokens)
    monkeypatch.setattr(distillation, "measure_curves", measure)
    yield calls
    assert not is_converted(model)


def recipe(tmp_path, students, changes=()):
    path = tmp_path / "recipe.yaml"
    path.write_text("model: tiny\n")
    return Recipe.load(path, [*CHANGES, *changes, f"students={json.dumps(students)}"])


def plan_of(folder, name, seed=0):
    return Plan.load(folder / "models" / f"{name}-seed{seed}" / "plan.json")


def test_curves_are_measured_once_for_all_seeds_and_spent(tmp_path, measurements):
    folder, students = tmp_path / "run", [{"name": "Measured"}, {"name": "Even", "strategy": "hybrid"}]
    results = run(recipe(tmp_path, students), folder)
    assert [len(row["runs"]) for row in results["models"]] == [2, 2]
    (file,) = folder.glob("curves*.json")
    ((budget, options),) = measurements
    assert budget == BUDGET
    expected = CURVES | {"feature_map": "mlp", "token_dtype": None, "keep_softmax": [], "seed": 0}
    assert {key: value for key, value in options.items() if key != "progress"} == expected
    curves = Curves.load(file)
    assert [curve.name for curve in curves.layers] == [FIRST, SECOND]
    profile = dofla.linear.Profile.load(folder / "profile")
    expected = dofla.linear.allocate(profile, BUDGET, "measured", curves=curves)
    for seed in (0, 1):
        assert plan_of(folder, "measured", seed).to_dict() == expected.to_dict()
    cost = HeadCost.of(8, 8, 4, "int8")
    assert {(x.features, x.window, x.sinks) for x in plan_of(folder, "even").layers} == {
        split(BUDGET * cost.feature, cost)
    }
    for row in results["models"]:
        assert row["state_bytes"] <= 2 * 2 * BUDGET * cost.feature
    written = file.read_bytes()
    assert run(recipe(tmp_path, students), folder)["models"] == results["models"]
    assert len(measurements) == 1
    assert file.read_bytes() == written


@pytest.mark.parametrize(
    ("kept", "left_out"), [([[FIRST], [SECOND], []], []), ([[SECOND], [SECOND]], [SECOND])], ids=["some", "all"]
)
def test_curves_are_of_the_layers_that_any_student_converts(tmp_path, measurements, kept, left_out):
    chosen = recipe(tmp_path, [{"name": str(n), "keep_softmax": names} for n, names in enumerate(kept)])
    students = Students(chosen, tmp_path)
    for spec, names in zip(chosen.students, kept, strict=True):
        assert [x.name for x in students.plan(spec).layers if isinstance(x, SoftmaxLayer)] == names
    ((_, options),) = measurements
    assert options["keep_softmax"] == left_out


@pytest.mark.slow
def test_each_feature_map_and_each_way_to_keep_tokens_has_curves_of_its_own(tmp_path, measurements):
    students = {
        "A": ({}, "int8"),
        "B": ({"token_dtype": "model"}, "model"),
        "C": ({"token_dtype": "model", "per_head": False}, "model"),
        "D": ({"token_dtype": "model", "strategy": "hybrid"}, "model"),
        "E": ({"token_dtype": "int8", "strategy": "dof", "window": 2}, "int8"),
        "F": ({"strategy": "dof", "window": 2}, "model"),
        "G": ({"feature_map": "exponential"}, "int8"),
        "H": ({"feature_map": "mlp"}, "int8"),
    }
    chosen = recipe(tmp_path, [{"name": name, **options} for name, (options, _) in students.items()])
    plans = {spec.name: Students(chosen, tmp_path).plan(spec) for spec in chosen.students}
    measured = [(options["token_dtype"], options["feature_map"]) for _, options in measurements]
    assert measured == [(None, "mlp"), ("model", "mlp"), (None, "exponential")]
    assert len(list(tmp_path.glob("curves*.json"))) == 3
    for name, (_, token_dtype) in students.items():
        assert {x.token_dtype for x in plans[name].layers} == {token_dtype}
    assert {x.feature_map for x in plans["G"].layers} == {"exponential"}
    assert all(len(set(x.sizes)) == 1 for x in plans["C"].layers)


def test_a_context_lets_layers_stay_softmax_and_damaged_curves_are_named(tmp_path, measurements):
    chosen = recipe(tmp_path, [{"name": "Short", "context": 2}, {"name": "Long", "context": 1000}])
    students = Students(chosen, tmp_path)
    short, long = (students.plan(spec) for spec in chosen.students)
    assert not short.converted
    assert long.converted == long.layers
    (file,) = tmp_path.glob("curves*.json")
    file.write_text(file.read_text()[:100])
    with pytest.raises(DoflaError, match=rf"{file.name} is not error curves"):
        Students(chosen, tmp_path).plan(chosen.students[0])


@pytest.mark.parametrize("strategy", ["hybrid", "measured"])
def test_features_start_from_data_unless_a_student_asks_for_chance(tmp_path, measurements, strategy):
    students = [{"name": name, "strategy": strategy, "start": name} for name in ("data", "random")]
    made = Students(recipe(tmp_path, students), tmp_path)
    statistics = {}
    for spec in made.recipe.students:
        with made.made(spec, 0) as student:
            tensors = [
                (key.rpartition("_")[2], tensor.clone())
                for layer in Converted.of(student).layers.values()
                for key, tensor in layer.state_dict().items()
                if key.endswith(("_mean", "_std"))
            ]
        statistics[spec.name] = tensors
    for what, tensor in statistics["random"]:
        assert (tensor == {"mean": 0, "std": 1}[what]).all()
    for what, tensor in statistics["data"]:
        assert not (tensor == {"mean": 0, "std": 1}[what]).any()
