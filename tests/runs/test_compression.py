"""Recipes of compressed caches; and what a recipe refuses."""

import copy
import json

import pytest
import torch
from sizes import size_of

import dofla
from dofla.compression.calibration import Calibration
from dofla.data import TokenWindows
from dofla.errors import DoflaError
from dofla.integration.checkpoint import apply_adapter
from dofla.integration.converted import is_converted
from dofla.plans.plan import Plan
from dofla.runs import DEMO, RECIPES, opened
from dofla.runs.folder import claim
from dofla.runs.recipe import Compression, Distillation, Recipe, demo_recipes
from dofla.runs.run import run

TOKENS = 20


@pytest.fixture
def open_as(monkeypatch):
    """A function that makes a model, a tokenizer and windows those of every recipe."""
    made = []

    def use(model, tokenizer, tokens):
        monkeypatch.setattr(opened, "open_original", lambda *_: (model, tokenizer))
        monkeypatch.setattr(opened, "windows_of", lambda *_, **__: tokens)
        made.append(model)

    yield use
    assert not any(map(is_converted, made))


def plan_of(folder, name="compressed"):
    return Plan.load(folder / "models" / f"{name}-seed0" / "plan.json")


def test_a_compression_is_that_of_compress(tiny, tmp_path, open_as):
    windows, size = TokenWindows.of(tiny.tokens(14, 24)), size_of(tiny.llama(), TOKENS)
    open_as(tiny.llama(), None, windows)
    asked = Recipe.load(RECIPES / "compress.yaml", ["model=tiny", f"size={size}", "evaluate.prompts=0"])
    results = run(asked, tmp_path / "run")
    model = dofla.compress(tiny.llama(), windows, size)
    assert plan_of(tmp_path / "run") == model.config.quantization_config.plan
    (row,) = results["models"]
    assert row["runs"][0]["language"]["loss"] == dofla.evaluate(model, windows).loss
    # What was measured stands in the adapter, and goes with it.
    read = dofla.linear.linearize(tiny.llama(), plan_of(tmp_path / "run"))
    apply_adapter(read, tmp_path / "run" / "models" / "compressed-seed0" / "adapter")
    with torch.no_grad():
        assert torch.equal(read(windows.input_ids).logits, model(windows.input_ids).logits)
    assert run(asked, tmp_path / "run") == results


def test_a_compression_that_holds_every_token(tiny, tmp_path, open_as):
    windows, options = TokenWindows.of(tiny.tokens(14, 24)), {"evict": False, "bits": 4.0}
    open_as(tiny.llama(), None, windows)
    results = run(Recipe.from_dict({"model": "tiny", "evaluate": {"prompts": 0}, **options}), tmp_path / "run")
    model = dofla.compress(tiny.llama(), windows, **options)
    assert plan_of(tmp_path / "run") == model.config.quantization_config.plan
    assert results["models"][0]["runs"][0]["language"]["loss"] == dofla.evaluate(model, windows).loss


def test_a_compression_for_a_context_with_retrieval_heads(tiny, tmp_path, tokenizer, open_as):
    def model():
        return tiny.llama(vocab_size=2048)

    windows, size = TokenWindows.of(tiny.tokens(4, 96)), size_of(model(), 144)
    open_as(model(), tokenizer, windows)
    options = {"context": 192, "retrieval_heads": 1}
    run(Recipe.from_dict({"model": "tiny", "size": size, **options}), tmp_path / "run")
    expected = dofla.compress(model(), windows, size, tokenizer=tokenizer, **options).config.quantization_config.plan
    found = plan_of(tmp_path / "run")
    assert found == expected
    assert found.context == 192
    assert found.made_by["retrieval_heads"]
    assert Calibration.load(tmp_path / "run" / "calibration.safetensors").made_by["tokens"] == 4 * 96


def test_the_default_recipe_trains_it_end_to_end(tiny, tmp_path, open_as):
    open_as(tiny.llama(), None, TokenWindows.of(tiny.tokens(12, 24)))
    changes = ["model=tiny", f"size={size_of(tiny.llama(), TOKENS)}", "evaluate.prompts=0"]
    (before,) = run(Recipe.load(RECIPES / "compress.yaml", changes), tmp_path / "training-free")["models"]
    changes += ["end_to_end.steps=24", "end_to_end.learning_rates={weights: 3.0e-4}"]
    (row,) = run(Recipe.load(RECIPES / "default.yaml", changes), tmp_path / "run")["models"]
    assert row["runs"][0]["language"]["kl"] < before["runs"][0]["language"]["kl"]
    home = tmp_path / "run" / "models" / "compressed-seed0"
    assert (home / "adapter").is_dir()
    assert (home / "end_to_end" / "adapter" / "lora.safetensors").exists()


def test_every_bundled_recipe_is_of_the_kind_that_it_should_be():
    kinds = {path.stem: type(Recipe.load(path, ["model=x"])) for path in RECIPES.glob("*.yaml")}
    compressions = {name for name, kind in kinds.items() if kind is Compression}
    assert compressions == {"compress", "default", "demo-compression"}
    assert {kinds[name] for name in kinds.keys() - compressions} == {Distillation}


def test_changes_to_the_demo_name_the_recipe():
    recipes = demo_recipes(["compression.size=1MiB", "distillation.data.windows=3"])
    assert list(recipes) == list(DEMO)
    assert recipes["compression"].size == "1MiB"
    assert [x.data.windows for x in recipes.values()] == [12, 3]
    with pytest.raises(DoflaError, match=r"--set 'size=1MiB': begin with compression\. or distillation\."):
        demo_recipes(["size=1MiB"])


def test_a_run_of_a_version_that_knew_fewer_fields_goes_on(tmp_path):
    data = Recipe.from_dict({"model": "x", "size": 64}).to_dict()
    before = copy.deepcopy(data)
    del before["context"], before["validation"]["windows"]
    before["prefill"] = "auto"  # which is exact by now
    assert Recipe.from_dict(before).to_dict() == data
    claim(tmp_path / "run", "recipe.yaml", before)
    claim(tmp_path / "run", "recipe.yaml", data)
    with pytest.raises(DoflaError, match="with another recipe"):
        claim(tmp_path / "run", "recipe.yaml", data | {"context": 64})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "'model' is missing"),
        ({"model": "x", "budgets": 3}, "budgets.*budget"),
        ({"model": "x", "ratio": "lots"}, "ratio.*lots"),
        ({"model": "x", "ratio": True}, "ratio.*True"),
        ({"model": "x", "data": {"wrong": 1}}, "data.*wrong"),
        ({"model": "x", "seeds": ["a"]}, "seeds"),
        ({"model": "x", "students": [{"name": "A", "token_dtype": 8}]}, "token_dtype.*8"),
        ({"model": "x", "seeds": []}, "'seeds' is empty"),
        ({"model": "x", "seeds": [0, -1]}, "'seeds' has -1"),
        ({"model": "x", "size": 64, "colour": 1}, "colour"),
        ({"model": "x", "budget": 8}, "there are no students, so this is a compression, which has no field 'budget'"),
        ({"model": "x", "lambda": 0.1}, "a compression, which has no field 'lambda'"),
        ({"model": "x", "students": []}, "'students' must be a list of at least one student"),
        ({"model": "x", "students": [{}], "size": 64}, "a distillation, which has no field 'size'"),
        (
            {"model": "x", "students": [{"name": "A b"}, {"name": "a (B)"}]},
            r"'A b' and 'a \(B\)' would share the folder a-b",
        ),
        ({"model": "x", "students": [{"name": "ß"}]}, "student 'ß': the name needs a letter of a to z or a digit"),
        ({"model": "x", "students": [{"start": "warm"}]}, "student Measured: start is 'warm': choose data or random"),
        ({"model": "x", "students": [{"end_to_end": True}]}, "end_to_end.steps is 0: give 1 or more"),
    ],
)
def test_bad_recipes_name_the_field_and_the_file(tmp_path, data, words):
    with pytest.raises(DoflaError, match=words):
        Recipe.from_dict(data)
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(data))
    with pytest.raises(DoflaError, match=f"{path}.*{words}"):
        Recipe.load(path)


@pytest.mark.parametrize(("text", "words"), [("[1]", "expected fields"), ("model: [x", "cannot be read")])
def test_a_file_that_is_no_recipe_is_named(tmp_path, text, words):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(DoflaError, match=f"{path}.*{words}"):
        Recipe.load(path)
