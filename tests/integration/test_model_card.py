"""What a student's folder says of it: README.md and the record that it is made from."""

import copy
import gc
import json
import pickle
import re
import weakref
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from sizes import compress
from tiny_families import own_student, plan_for, student, teacher, tokens
from transformers import AutoModelForCausalLM

import dofla
from dofla.data import TokenWindows
from dofla.display import factor
from dofla.integration.converted import Converted
from dofla.integration.model_card import by_hand, write_card
from dofla.integration.record import Record, Training, without_folders
from dofla.plans.plan import Plan
from dofla.runs import opened
from dofla.runs.opening import open_original
from dofla.runs.recipe import Recipe
from dofla.runs.run import run
from dofla.tasks import Comparison, Difference, TaskResults

LANGUAGE = {"original_loss": 1.5, "loss": 1.625, "loss_increase": 0.125, "loss_increase_interval": [0.1, 0.15]}
LANGUAGE |= {"kl": 0.25, "top1_agreement": 0.875}
FIGURES = {"source": "/home/me/my_text.txt.gz (validation)", "windows": 8, "length": 24, "language": LANGUAGE}


def student_of(base):
    model = AutoModelForCausalLM.from_pretrained(base)
    return dofla.linear.linearize(model, plan_for(model, "ragged"))


def front_matter(folder):
    """The YAML of README.md, read without huggingface_hub."""
    _, block, _ = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(block)


def text_of(folder):
    return ModelCard.load(folder / "README.md").text


def saved(model, folder, kind):
    if kind == "adapter":
        return dofla.save_adapter(model, folder)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["adapter", "standalone"])
def test_a_card_says_what_the_student_is(kind, base, tmp_path):
    model = student_of(base)
    dofla.note(model, figures=FIGURES, command="dofla evaluate out --data my_text.txt.gz")
    dofla.note(model, base_model="owner/name", license="cc-by-4.0")
    folder = saved(model, tmp_path / "out", kind)
    data = front_matter(folder)
    (results,) = data.pop("model-index")[0]["results"]
    assert data == {
        "base_model": "owner/name",
        "license": "cc-by-4.0",
        "library_name": "dofla",
        "pipeline_tag": "text-generation",
        "tags": ["dofla", "linear-attention"],
        "metrics": ["loss", "perplexity", "loss_increase", "kl", "agreement"],
    }
    values = {metric["type"]: metric["value"] for metric in results["metrics"]}
    assert values == {"loss": 1.625, "perplexity": 5.0784, "loss_increase": 0.125, "kl": 0.25, "agreement": 0.875}
    text = text_of(folder)
    assert ('dofla.load("out")' in text) == (kind == "adapter")
    assert ('AutoModelForCausalLM.from_pretrained("out")' in text) == (kind == "standalone")
    assert "| loss increase, nats per token | 0.125 (0.1 to 0.15) |" in text
    assert "1. `dofla evaluate out --data my_text.txt.gz`" in text
    assert "/home/me" not in (folder / "README.md").read_text()
    # As the hub reads and writes it, not a letter changes.
    assert str(ModelCard.load(folder / "README.md")) == (folder / "README.md").read_text()


def test_the_plan_is_a_few_lines(tmp_path):
    model = student("gpt2", "softmax_last")
    model.save_pretrained(tmp_path)
    plan, text = Converted.of(model).plan, text_of(tmp_path)
    lines = [line for line in text.partition("## The plan")[2].partition("\n## ")[0].splitlines() if line]
    layer = plan.layers[0]
    assert (layer.window, layer.sinks) == (0, 0)
    assert lines[:3] == [
        "- Attention layers: 2, of which 1 have linear attention and 1 keep softmax attention.",
        f"- Per KV head: {layer.features} features.",
        f"- Feature map: {layer.feature_map}.",
    ]
    assert len(lines) <= 4
    held = plan.cache_bytes(1024)
    before = plan.softmax_bytes(1024)
    assert f"The cache takes {held / 1024:.1f} KiB per sequence" in text
    assert factor(before, held) in text


def test_the_last_evaluation_stands_on_the_card_until_the_weights_change(base, tmp_path):
    model, windows = student_of(base), TokenWindows(tokens(4, 24), source="stories")
    dofla.evaluate(model, windows)
    found = dofla.evaluate(model, windows)
    text = text_of(saved(model, tmp_path / "out", "adapter"))
    assert text.count("loss increase, nats per token") == 1
    assert f"| {found.loss_increase:.4g} (" in text
    dofla.linear.distill(model, windows, steps=1, rows=8)
    assert "None are recorded." in text_of(saved(model, tmp_path / "trained", "adapter"))


@pytest.mark.parametrize("context", [None, 48])
def test_a_compressed_cache_is_named_so_with_the_shares_of_its_heads(context, tmp_path):
    model = compress(teacher("llama"), tokens(12, 48), tokens=48, context=context)
    shares = [share for own in Converted.of(model).plan.made_by["head_budgets"].values() for share in own]
    Converted.of(model).plan.made_by["held_out"] = {"even": 0.3178, "eviction": 0.2041, "reading": 0.1}
    text = text_of(saved(model, tmp_path, "standalone"))
    assert "with a compressed key-value cache" in text
    assert "linear attention" not in text
    assert "2 have a compressed cache." in text
    spread = f"KV heads have {min(shares):.2f} to {max(shares):.2f} times the bytes of an even split"
    assert f"Made with strategy compressed, size 2.2 KiB, {spread}" in text
    assert not re.search("[{}]|held_out", text)
    assert "- KL on held-out windows: 0.32 even, 0.2 eviction, 0.1 reading (kept).\n" in text
    trained = " ".join(text.partition("## How it was trained")[2].partition("\n## ")[0].split())
    assert trained == (
        "Nothing was trained: the cache was calibrated on tensor, 576 tokens. "
        "Measured were the means and directions of keys and values, and how many bytes each KV head needs."
    )
    assert ("calibrated for a context of" in text) == (context is not None)
    assert ("calibrated for a context of 48 tokens" in text) == (context == 48)
    assert front_matter(tmp_path)["tags"] == ["dofla", "kv-cache"]


@pytest.mark.parametrize(("family", "auto_class", "task"), [
    ("bert", "AutoModel", "feature-extraction"),
    ("roberta", "AutoModelForMaskedLM", "fill-mask"),
    ("vit", "AutoModelForImageClassification", "image-classification"),
])  # fmt: skip
def test_a_card_names_the_class_and_the_pipeline_of_its_model(family, auto_class, task, tmp_path):
    student(family).save_pretrained(tmp_path)
    assert front_matter(tmp_path)["pipeline_tag"] == task
    assert f"model = {auto_class}.from_pretrained" in text_of(tmp_path)
    assert "state per sequence" not in text_of(tmp_path)


def test_training_is_put_on_record(base, tmp_path):
    model = student_of(base)
    windows = TokenWindows(tokens(8, 24), source="owner/stories@train (train)")
    dofla.linear.distill(model, windows, steps=2, rows=8, context=24)
    mine = TokenWindows(tokens(4, 24), source="/data/mine.txt (train)")
    dofla.linear.distill_end_to_end(model, mine, steps=1, context=64)
    layerwise, whole = Converted.of(model).record.training
    assert (layerwise.steps, layerwise.positions, layerwise.weights) == (2, 24, False)
    assert layerwise.command.startswith("dofla.linear.distill(student, windows, loss='output', steps=2, batch_size=2")
    assert (whole.steps, whole.positions, whole.weights) == (1, 64, True)
    assert whole.text == "mine.txt (train), 4 windows of 24 tokens, read anywhere among 64 positions"
    for kind in ("adapter", "standalone"):
        folder = saved(model, tmp_path / kind, kind)
        assert front_matter(folder)["datasets"] == ["owner/stories"]
        text = text_of(folder)
        assert "feature maps, layer by layer: 2 steps on owner/stories@train (train), 8 windows of 24 tokens" in text
        assert whole.command in text
        assert "It was trained on 64 positions" in text
        assert ("no longer the original's" in text) == (kind == "standalone")
        assert Converted.of(dofla.load(folder)).record == Converted.of(model).record
    # The command does it again.
    again = student_of(base)
    eval(layerwise.command, {"dofla": dofla, "student": again, "windows": windows})
    assert Converted.of(again).record.training == [layerwise]


@pytest.mark.parametrize(
    ("made_from", "source", "may"),
    [
        ("", "text.txt", True),
        ("text.txt (train), 32 tokens", "/home/me/text.txt", True),
        ("data/text.txt (train), 32 tokens", "text.txt", True),
        ("a.txt, text.txt (train), 32 tokens", "text.txt", True),
        ("my_text.txt (train), 32 tokens", "text.txt", False),
        ("self: samples of LlamaForCausalLM (train, seed 0), 32 tokens", "sample", False),
        ("me/set:en@train (train), 32 tokens", "me/set:en", True),
        ("me/set:en (train), 32 tokens", "me/set:en@test", False),
        ("a.txt, b.txt, c.txt and 2 more (train), 32 tokens", "text.txt", True),
        ("3 texts in memory (train), 32 tokens", "text.txt", True),
        ("tensor, 32 tokens", "text.txt", True),
    ],
)
def test_a_record_tells_whether_a_text_may_have_been_read(made_from, source, may):
    assert Record(calibration=made_from).may_have_read(source) == may
    training = [Training("", made_from.replace("32 tokens", "1 windows"), 1, "")] if made_from else []
    assert Record(training=training).may_have_read(source) == may


def test_no_training_and_no_figures_are_said_to_be_none(tmp_path):
    student("llama").save_pretrained(tmp_path)
    assert "No training is recorded." in text_of(tmp_path)
    assert "None are recorded." in text_of(tmp_path)
    assert not {"datasets", "metrics", "model-index", "base_model", "license"} & front_matter(tmp_path).keys()
    assert "could not be read from here" in text_of(tmp_path)


@pytest.mark.parametrize(
    ("card", "config", "expected"),
    [
        ("---\nlicense: apache-2.0\n---\n", {}, {"license": "apache-2.0"}),
        (
            "---\nlicense: other\nlicense_name: mine\nlicense_link: LICENSE\n---\n",
            {},
            {"license": "other", "license_name": "mine", "license_link": "LICENSE"},
        ),
        ("No front matter.", {"license": "mit"}, {"license": "mit"}),
        ("---\nlicense: [a, b]\n---\n", {}, {}),
        ("---\n: : [\n---\n", {}, {}),
        (None, {}, {}),
    ],
)
def test_the_license_is_that_of_the_base_model(card, config, expected, base, tmp_path):
    if card is not None:
        (base / "README.md").write_text(card)
    (base / "config.json").write_text(json.dumps(json.loads((base / "config.json").read_text()) | config))
    model = student_of(base)
    model.save_pretrained(tmp_path / "out")
    assert {k: v for k, v in front_matter(tmp_path / "out").items() if k.startswith("license")} == expected
    base.rename(tmp_path / "gone")
    dofla.load(tmp_path / "out").save_pretrained(tmp_path / "again")
    assert {k: v for k, v in front_matter(tmp_path / "again").items() if k.startswith("license")} == expected


def test_students_of_the_bundled_teacher_have_its_license(tmp_path):
    student = dofla.linear.linearize(open_original("demo")[0], budget=4)
    assert front_matter(saved(student, tmp_path / "out", "adapter"))["license"] == "apache-2.0"


@pytest.mark.parametrize("name", ["smollm2-135m-measured", "smollm2-135m-compressed", "smollm2-135m-compressed-256"])
def test_students_in_the_repository_have_cards_made_of_their_plan_and_record(tmp_path, name):
    folder = Path(__file__).parents[2] / "docs" / "students" / name
    assert not by_hand(folder / "README.md")
    record, data = Record.load(folder / "record.json"), front_matter(folder)
    assert (data["base_model"], data["license"]) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")
    values = [metric["value"] for result in data["model-index"][0]["results"] for metric in result["metrics"]]
    assert values == [round(figure.model, 4) for figure in record.figures]
    write_card(tmp_path, Plan.load(folder), record, adapter=True, name=f"docs/students/{name}")
    table = [[line for line in text_of(x).splitlines() if line.startswith("| ")] for x in (folder, tmp_path)]
    assert table[0] == table[1]


@pytest.mark.parametrize(
    ("change", "by_hand"),
    [
        (lambda text: b"Mine.\n", True),
        (lambda text: text + b"More.\n", True),
        (lambda text: b"", True),
        (lambda text: text, False),
        (lambda text: text.replace(b"\n", b"\r\n"), False),
    ],
)
def test_a_card_that_a_person_wrote_or_changed_stays(change, by_hand, tmp_path):
    model, path = own_student("llama"), tmp_path / "README.md"
    model.save_pretrained(tmp_path)
    before = change(path.read_bytes())
    path.write_bytes(before)
    dofla.note(model, figures=FIGURES)
    model.save_pretrained(tmp_path)
    assert (path.read_bytes() == before) == by_hand
    assert (b"0.125" in path.read_bytes()) != by_hand


@pytest.mark.parametrize("kind", ["adapter", "standalone"])
def test_figures_can_be_put_into_a_folder(kind, base, tmp_path):
    folder = saved(student_of(base), tmp_path / "out", kind)
    (tmp_path / "evaluation.json").write_text(json.dumps(FIGURES))
    weights = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    dofla.note(folder, figures=tmp_path / "evaluation.json", command="python judge.py")
    assert "python judge.py" in text_of(folder)
    other = FIGURES | {"language": LANGUAGE | {"loss_increase": 0.0625}}
    dofla.note(str(folder), figures=other)
    dofla.note(folder, figures=FIGURES | {"source": "another.txt"}, base_model="owner/base")
    figures = Converted.of(dofla.load(folder, base_model=base)).record.figures
    gaps = [(figure.model, figure.source) for figure in figures if figure.metric == "loss_increase"]
    text = "my_text.txt.gz (validation), 8 windows of 24 tokens"
    assert gaps == [(0.0625, text), (0.125, "another.txt, 8 windows of 24 tokens")]
    assert front_matter(folder)["base_model"] == "owner/base"
    assert weights == {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_figures_of_tasks_and_encoders_are_known(tmp_path):
    model = own_student("llama")
    metrics = {name: {"model": 0.5, "original": 0.75} for name in ("acc", "f1, all")}
    dofla.note(model, figures={"tasks": {"tasks": [{"task": "arc", "items": 40, "metrics": metrics}]}})
    dofla.note(model, figures={"source": "x", "windows": 3, "embeddings": {"cosine": 0.9, "spearman": 0.8}})
    figures = Converted.of(model).record.figures
    found = {figure.metric: (figure.model, figure.original, figure.source) for figure in figures}
    assert found == {
        "accuracy": (0.5, 0.75, "arc, 40 items"),
        "f1-all": (0.5, 0.75, "arc, 40 items"),
        "cosine": (0.9, None, "x, 3 windows"),
        "spearman": (0.8, None, "x, 3 windows"),
    }
    model.save_pretrained(tmp_path)
    results = front_matter(tmp_path)["model-index"][0]["results"]
    assert sorted(metric["type"] for result in results for metric in result["metrics"]) == sorted(found)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"figures": {}}, "figures hold none"),
        ({"figures": {"language": {"loss_increase": 1}}}, "not those of an evaluation .*loss"),
        ({"figures": {"language": 3}}, "not those of an evaluation"),
        ({"figures": "nowhere.json"}, "nowhere.json does not exist"),
        ({"base_model": "a folder/of mine"}, "base_model is 'a folder/of mine'"),
    ],
)
def test_what_is_no_note_is_refused(options, match):
    model = own_student("llama")
    with pytest.raises(dofla.DoflaError, match=match):
        dofla.note(model, **options)
    assert Converted.of(model).record == Record()


def test_notes_on_what_is_no_student_are_refused(base, tmp_path):
    with pytest.raises(dofla.DoflaError, match="not converted"):
        dofla.note(teacher("llama"), license="mit")
    with pytest.raises(dofla.DoflaError, match="is not a converted model"):
        dofla.note(base, license="mit")
    with pytest.raises(dofla.DoflaError, match="does not exist"):
        dofla.note(tmp_path / "nothing", license="mit")


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ([], "record.json is not"),
        ({"base_model": 3}, "base_model is 3: expected str"),
        ({"training": [{"how": "x"}]}, r"training\[0\]: 'text' is missing"),
        ({"license": {"license": 3}}, "license is"),
        ({"figures": 3}, "figures is 3"),
    ],
)
def test_a_damaged_record_is_refused_in_one_line(record, match, base, tmp_path):
    folder = saved(student_of(base), tmp_path / "out", "adapter")
    (folder / "record.json").write_text(json.dumps(record))
    with pytest.raises(dofla.DoflaError, match=match) as caught:
        dofla.load(folder)
    assert "\n" not in str(caught.value)


def test_an_adapter_without_a_record_and_one_of_a_later_version_open(base, tmp_path):
    folder = saved(student_of(base), tmp_path / "out", "adapter")
    (folder / "record.json").write_text(json.dumps({"base_model": "owner/name", "color": "green"}))
    assert Converted.of(dofla.load(folder)).record.base_model == "owner/name"
    (folder / "record.json").unlink()
    assert Converted.of(dofla.load(folder)).record == Record()


def test_a_student_is_freed_copied_and_pickled_as_any_model(tmp_path):
    model, plain = own_student("llama"), teacher("llama")
    gc.collect()
    gc.disable()
    try:
        watched = [weakref.ref(model), weakref.ref(plain)]
        copies = {"copied": copy.deepcopy(model), "pickled": pickle.loads(pickle.dumps(model))}
        del model, plain
        assert [watch() for watch in watched] == [None, None]
    finally:
        gc.enable()
    for name, one in copies.items():
        dofla.note(one, license=name)
        with torch.no_grad():
            one.lm_head.weight.zero_()
        one.save_pretrained(tmp_path / name)
        assert front_matter(tmp_path / name)["license"] == name
        assert not dofla.load(tmp_path / name).lm_head.weight.any()


def test_only_students_write_cards_and_only_the_first_process(tmp_path):
    model = own_student("llama")
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other" / "README.md").exists()
    dofla.restore(model).save_pretrained(tmp_path / "plain")
    teacher("llama").save_pretrained(tmp_path / "teacher")
    assert not list(tmp_path.glob("*/README.md"))


def test_results_are_taken_as_they_come(base):
    student = student_of(base)
    tasks = TaskResults([Comparison("piqa", 8, {"acc": Difference(0.75, 0.1, 0.5, 0.1, -0.25, 0.1)}, 0.625)])
    dofla.note(student, figures=tasks)
    dofla.note(student, figures=dofla.evaluate(student, tokens(4, 24)))
    (accuracy, *others) = Converted.of(student).record.figures
    assert (accuracy.model, accuracy.original, accuracy.source) == (0.5, 0.75, "piqa, 8 items")
    assert [figure.metric for figure in others] == ["loss", "perplexity", "loss_increase", "kl", "agreement"]


def test_a_run_puts_figures_and_training_on_the_cards_of_its_students(base, tmp_path, monkeypatch):
    arguments = ["run", "/home/me/tiny.yaml", "--set", "data.source=/home/me/a b.txt"]
    monkeypatch.setattr("sys.argv", ["/usr/bin/dofla", *arguments])
    text = TokenWindows(tokens(8, 24), source="/home/me/a b.txt (train)")
    model = AutoModelForCausalLM.from_pretrained(base)
    monkeypatch.setattr(opened, "open_original", lambda *_: (model, None))
    monkeypatch.setattr(opened, "windows_of", lambda *_, **__: text)
    data = {"model": "tiny", "budget": 8, "students": [{"name": "Even", "strategy": "hybrid"}]}
    data |= {"profile": {"samples": 32, "windows": 4}, "distill": {"steps": 2, "rows": 8}}
    run(Recipe.from_dict(data), tmp_path / "run")
    folder = tmp_path / "run" / "models" / "even-seed0" / "adapter"
    record = Converted.of(dofla.load(folder)).record
    command = "dofla run tiny.yaml --set 'data.source=a b.txt'"
    assert [training.command for training in record.training] == [command]
    assert {figure.command for figure in record.figures} == {command}
    figures = json.loads((folder.parent / "evaluation.json").read_text())
    assert record.figures[2].model == figures["language"]["loss_increase"]
    assert f"1. `{command}`" in text_of(folder)
    assert "a b.txt (train), 8 windows of 24 tokens" in text_of(folder)
    assert "/home/me" not in "".join(path.read_text() for path in folder.glob("*.md"))


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("/home/me/a.txt (train)", "a.txt (train)"),
        ("../shared/a.txt, ~/b.txt (train)", "a.txt, b.txt (train)"),
        ("data.source=/x/y.txt", "data.source=y.txt"),
        ("owner/name:config@split (train)", "owner/name:config@split (train)"),
        ("runs/demo/a.txt", "runs/demo/a.txt"),
    ],
)
def test_folders_outside_this_one_are_not_given_away(said, shown):
    assert without_folders(said) == shown
