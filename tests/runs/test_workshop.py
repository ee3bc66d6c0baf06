"""Students of a recipe that need error curves, and how their features start."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from by_budget import compress, size_of
from dofla.plans.head_budgets import HeadBudgets

import dofla
from dofla.data import TokenWindows
from dofla.errors import DoflaError
from dofla.integration.checkpoint import apply_adapter
from dofla.integration.student import Student, is_linearized
from dofla.plans.curves import Curves
from dofla.plans.hybrid import HeadCost, split
from dofla.plans.plan import Plan
from dofla.runs import workshop
from dofla.runs.recipe import Recipe
from dofla.runs.run import run
from dofla.runs.workshop import Workshop, claim

BUDGET = 8
FIRST, SECOND = "model.layers.0.self_attn", "model.layers.1.self_attn"
CURVES = {"windows": 10, "steps": 2, "batch_size": 2, "rows": 8, "held_out": 2}
CHANGES = [f"budget={BUDGET}", "seeds=[0, 1]", "distill.steps=2", "distill.rows=8", "evaluate.prompts=0"]
CHANGES += ["profile.samples=32", "profile.windows=4", *(f"curves.{name}={value}" for name, value in CURVES.items())]


@pytest.fixture
def measurements(tiny, monkeypatch):
    """A tiny teacher for every recipe; the calls of ``measure_curves`` are listed, as (budget, options)."""
    model, tokens, calls = tiny.llama(), TokenWindows.of(tiny.tokens(12, 24)), []

    def measure(teacher, windows, budget, **options):
        calls.append((budget, options | {"windows": len(windows)}))
        return dofla.measure_curves(teacher, windows, budget, **options)

    monkeypatch.setattr(workshop, "load_teacher", lambda *_: (model, None))
    monkeypatch.setattr(workshop, "windows_of", lambda *_, **__: tokens)
    monkeypatch.setattr(workshop, "measure_curves", measure)
    yield calls
    assert not is_linearized(model)


def recipe(tmp_path, students, changes=()):
    path = tmp_path / "recipe.yaml"
    path.write_text("model: tiny\n")
    return Recipe.load(path, [*CHANGES, *changes, f"students={json.dumps(students)}"])


def plan_of(folder, name, seed=0):
    return Plan.load(folder / "students" / f"{name}-seed{seed}" / "plan.json")


def test_curves_are_measured_once_for_all_seeds_and_spent(tmp_path, measurements):
    folder, students = tmp_path / "run", [{"name": "Measured"}, {"name": "Even", "strategy": "hybrid"}]
    results = run(recipe(tmp_path, students), folder)
    assert [len(row["runs"]) for row in results["students"]] == [2, 2]
    (file,) = folder.glob("curves*.json")
    ((budget, options),) = measurements
    assert budget == BUDGET
    expected = CURVES | {"feature_map": "mlp", "token_dtype": None, "keep_softmax": [], "seed": 0}
    assert {key: value for key, value in options.items() if key != "progress"} == expected
    curves = Curves.load(file)
    assert [curve.name for curve in curves.layers] == [FIRST, SECOND]
    profile = dofla.Profile.load(folder / "profile")
    expected = dofla.allocate(profile, BUDGET, "measured", curves=curves)
    for seed in (0, 1):
        assert plan_of(folder, "measured", seed).to_dict() == expected.to_dict()
    cost = HeadCost.of(8, 8, 4, "int8")
    assert {(x.features, x.window, x.sinks) for x in plan_of(folder, "even").layers} == {
        split(BUDGET * cost.feature, cost)
    }
    for row in results["students"]:
        assert row["state_bytes"] <= 2 * 2 * BUDGET * cost.feature
    written = file.read_bytes()
    assert run(recipe(tmp_path, students), folder)["students"] == results["students"]
    assert len(measurements) == 1
    assert file.read_bytes() == written


def test_students_that_keep_other_layers_softmax_share_the_curves(tmp_path, measurements):
    names = {"First": [FIRST], "Second": [SECOND], "None": []}
    students = [{"name": name, "keep_softmax": kept} for name, kept in names.items()]
    folder = tmp_path / "run"
    run(recipe(tmp_path, students, ["seeds=[0]"]), folder)
    assert len(measurements) == 1
    for name, kept in names.items():
        assert [x.name for x in plan_of(folder, name.lower()).layers if x.keep_softmax] == kept


def test_layers_that_all_students_keep_softmax_are_not_measured(tmp_path, measurements):
    students = [{"name": name, "keep_softmax": [SECOND]} for name in ("One", "Other")]
    run(recipe(tmp_path, students, ["seeds=[0]"]), tmp_path / "run")
    ((_, options),) = measurements
    assert options["keep_softmax"] == [SECOND]
    assert plan_of(tmp_path / "run", "one")[SECOND].keep_softmax


@pytest.mark.slow
def test_each_feature_map_has_curves_of_its_own(tmp_path, measurements):
    students = [{"name": "A"}, {"name": "B", "feature_map": "exponential"}, {"name": "C", "feature_map": "mlp"}]
    folder = tmp_path / "run"
    run(recipe(tmp_path, students, ["seeds=[0]"]), folder)
    assert [options["feature_map"] for _, options in measurements] == ["mlp", "exponential"]
    assert len(list(folder.glob("curves*.json"))) == 2
    assert {x.feature_map for x in plan_of(folder, "b").layers} == {"exponential"}


@pytest.mark.slow
def test_each_way_to_keep_tokens_has_curves_of_its_own(tmp_path, measurements):
    students = [
        {"name": "A"},
        {"name": "B", "token_dtype": "model"},
        {"name": "C", "token_dtype": "model", "per_head": False},
        {"name": "D", "token_dtype": "model", "strategy": "hybrid"},
        {"name": "E", "token_dtype": "int8", "strategy": "dof", "window": 2},
        {"name": "F", "strategy": "dof", "window": 2},
    ]
    folder = tmp_path / "run"
    run(recipe(tmp_path, students, ["seeds=[0]"]), folder)
    assert [options["token_dtype"] for _, options in measurements] == [None, "model"]
    assert len(list(folder.glob("curves*.json"))) == 2
    expected = {"a": "int8", "b": "model", "c": "model", "d": "model", "e": "int8", "f": "model"}
    for name, token_dtype in expected.items():
        assert {x.token_dtype for x in plan_of(folder, name).layers} == {token_dtype}
    assert all(len(set(x.sizes)) == 1 for x in plan_of(folder, "c").layers)


def test_a_context_lets_layers_stay_softmax(tmp_path, measurements):
    chosen = recipe(tmp_path, [{"name": "Short", "context": 2}, {"name": "Long", "context": 1000}])
    shop = Workshop(chosen, tmp_path / "shop")
    (tmp_path / "shop").mkdir()
    short, long = (shop.plan(spec) for spec in chosen.students)
    assert all(x.keep_softmax for x in short.layers)
    assert not any(x.keep_softmax for x in long.layers)


@pytest.mark.parametrize("strategy", ["hybrid", "measured"])
def test_features_start_from_data_unless_a_student_asks_for_chance(tmp_path, measurements, strategy):
    students = [{"name": "Data", "strategy": strategy}, {"name": "Random", "strategy": strategy, "start": "random"}]
    shop = Workshop(recipe(tmp_path, students), tmp_path / "shop")
    (tmp_path / "shop").mkdir()
    statistics = {}
    for spec in shop.recipe.students:
        with shop.student(spec, 0) as student:
            tensors = [
                (key.rpartition("_")[2], tensor.clone())
                for layer in Student.of(student).layers.values()
                for key, tensor in layer.state_dict().items()
                if key.endswith(("_mean", "_std"))
            ]
        statistics[spec.name] = tensors
    for what, tensor in statistics["Random"]:
        assert (tensor == {"mean": 0, "std": 1}[what]).all()
    for what, tensor in statistics["Data"]:
        assert not (tensor == {"mean": 0, "std": 1}[what]).any()


def test_a_start_that_does_not_exist_is_one_line(tmp_path, measurements):
    with pytest.raises(DoflaError, match="student A: start is 'warm': choose data or random") as error:
        run(recipe(tmp_path, [{"name": "A", "strategy": "hybrid", "start": "warm"}]), tmp_path / "run")
    assert "\n" not in str(error.value)


def test_damaged_curves_are_named(tmp_path, measurements):
    folder, chosen = tmp_path / "run", recipe(tmp_path, [{"name": "A"}])
    shop = Workshop(chosen, folder)
    folder.mkdir()
    shop.curves(chosen.students[0])
    (file,) = folder.glob("curves*.json")
    file.write_text(file.read_text()[:100])
    with pytest.raises(DoflaError, match=rf"{file.name} is not error curves"):
        shop.plan(chosen.students[0])


def test_by_default_a_recipe_has_one_measured_student_that_starts_from_data():
    (student,) = Recipe.from_dict({"model": "x"}).students
    assert (student.strategy, student.start, student.feature_map) == ("measured", "data", None)


def test_a_memory_that_fades_at_once(tmp_path, measurements, tiny):
    path, folder = Path(workshop.__file__).parent / "recipes" / "compress.yaml", tmp_path / "run"
    asked = Recipe.load(path, ["model=tiny", f"budget={BUDGET}", "profile.windows=4", "evaluate.prompts=0"])
    (row,) = run(asked, folder)["students"]
    assert not measurements
    windows = TokenWindows.of(tiny.tokens(12, 24))
    student = compress(tiny.llama(), windows.take(4), budget=BUDGET, batch_size=asked.profile.batch_size)
    assert plan_of(folder, "compressed") == student.config.quantization_config.plan
    assert (
        plan_of(folder, "compressed").made_by["head_budgets"]
        == HeadBudgets.load(folder / f"head-budgets-{size_of(tiny.llama(), BUDGET)}.json").layers
    )
    assert row["runs"][0]["language"]["student_loss"] == dofla.evaluate(student, windows).student_loss
    # What was measured stands in the adapter, and goes with it.
    opened = dofla.linearize(tiny.llama(), plan_of(folder, "compressed"))
    apply_adapter(opened, folder / "students" / "compressed-seed0" / "adapter")
    with torch.no_grad():
        assert torch.equal(opened(windows.input_ids).logits, student(windows.input_ids).logits)


def test_a_memory_that_fades_for_so_many_positions_with_heads_that_hold_them_all(
    tmp_path, measurements, tiny, tokenizer, monkeypatch
):
    model, tokens = tiny.llama(vocab_size=2048), TokenWindows.of(tiny.tokens(8, 96))
    monkeypatch.setattr(workshop, "load_teacher", lambda *_: (model, tokenizer))
    monkeypatch.setattr(workshop, "windows_of", lambda *_, **__: tokens)
    folder, options = tmp_path / "run", {"context": 192, "retrieval_heads": 1}
    known = {"strategy": "compressed", "trained": False, "budget": 32}
    asked = {"All": {}, "Near": {"context": 192}, "Facts": options}
    students = [{"name": name} | known | own for name, own in asked.items()]
    run(recipe(tmp_path, students, ["profile.windows=4", "seeds=[0]"]), folder)
    assert not measurements
    for name, own in asked.items():
        student = compress(model, tokens.take(4), budget=32, batch_size=4, tokenizer=tokenizer, **own)
        plan = plan_of(folder, name.lower())
        assert plan == student.config.quantization_config.plan
        assert plan.context == own.get("context")
        with torch.no_grad():
            expected = student(tokens.input_ids[:2], use_cache=False).logits
        dofla.restore(model)
        apply_adapter(dofla.linearize(model, plan), folder / "students" / f"{name.lower()}-seed0" / "adapter")
        with torch.no_grad():
            assert torch.equal(model(tokens.input_ids[:2], use_cache=False).logits, expected)
        dofla.restore(model)
    assert plan_of(folder, "facts").made_by["retrieval_heads"]
    assert sorted(path.name for path in folder.glob("head-budgets-*.json")) == [
        "head-budgets-5120-context-192-retrieval-1.json",
        "head-budgets-5120-context-192.json",
        "head-budgets-5120.json",
    ]


def test_a_run_of_a_version_that_knew_fewer_fields_goes_on(tmp_path):
    student = {"name": "A", "strategy": "compressed", "trained": False}
    data = recipe(tmp_path, [student]).to_dict()
    before = copy.deepcopy(data)
    del before["students"][0]["context"], before["students"][0]["retrieval_heads"], before["validation"]["windows"]
    claim(tmp_path / "run", "recipe.yaml", before)
    claim(tmp_path / "run", "recipe.yaml", data)
    changed = recipe(tmp_path, [student | {"context": 64}]).to_dict()
    with pytest.raises(DoflaError, match="with another recipe"):
        claim(tmp_path / "run", "recipe.yaml", changed)


def test_the_default_recipe_trains_it_end_to_end(tmp_path, measurements):
    recipes, folder = Path(workshop.__file__).parent / "recipes", tmp_path / "run"
    changes = ["model=tiny", f"budget={BUDGET}", "profile.windows=4", "evaluate.prompts=0", "end_to_end.steps=24"]
    changes += ["end_to_end.learning_rates={weights: 3.0e-4}"]
    asked = Recipe.load(recipes / "default.yaml", changes)
    (row,) = run(asked, folder)["students"]
    at_once = Recipe.load(recipes / "compress.yaml", changes[:4])
    (before,) = run(at_once, tmp_path / "training-free")["students"]
    assert not measurements
    assert row["runs"][0]["language"]["kl"] < before["runs"][0]["language"]["kl"]
    home = folder / "students" / "compressed-seed0"
    assert (home / "adapter").is_dir()
    assert (home / "end_to_end" / "adapter" / "lora.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "student Old has no features to train: give trained: false"),
        ({"trained": False, "head_budgets": "odd"}, "student Old: head_budgets is 'odd': give measured or even"),
        ({"trained": False, "window": 4}, "strategy compressed has no option window: leave it out"),
        (
            {"trained": False, "feature_map": "mlp"},
            "strategy compressed has no option feature_map: leave it out",
        ),
        (
            {"trained": False, "head_budgets": "even", "retrieval_heads": 2},
            "retrieval_heads is 2: they are found when head budgets are measured, so leave head_budgets out",
        ),
        ({"strategy": "hybrid", "size": 64}, "strategy hybrid has no option size: leave it out"),
        (
            {"strategy": "dof", "retrieval_heads": 1},
            "strategy dof has no option retrieval_heads: leave it out",
        ),
    ],
)
def test_a_memory_that_fades_has_no_features(tmp_path, options, words):
    with pytest.raises(DoflaError, match=words):
        recipe(tmp_path, [{"name": "Old", "strategy": "compressed"} | options])
