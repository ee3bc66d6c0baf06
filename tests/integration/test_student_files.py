"""Students on disk: folders any Hugging Face user can open, adapters that hold the feature maps alone."""

import json
import shutil

import pytest
import torch
from arithmetic import LOGITS
from safetensors.torch import load_file, save_file
from sizes import compress
from students import without_checksums
from tiny_families import CASES, CAUSAL, own_student, plan_for, student, teacher, tokens
from torch.testing import assert_close
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
)

import dofla
from dofla.integration import checkpoint
from dofla.integration.checkpoint import ADAPTER, WEIGHTS, feature_map_tensors, load_model
from dofla.integration.converted import Converted
from dofla.integration.instead import computed_instead
from dofla.runs.demo import model_path
from dofla.storage.files import sha256


@torch.no_grad()
def logits(model):
    return model(input_ids=tokens(2, 20)).logits


def assert_same_student(opened, original):
    assert type(opened) is type(original)
    assert Converted.of(opened).plan.to_dict() == Converted.of(original).plan.to_dict()
    assert opened.state_dict().keys() == original.state_dict().keys()
    assert_close(logits(opened), logits(original), rtol=0, atol=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A standalone llama student; not to be changed."""
    path = tmp_path_factory.mktemp("standalone") / "student"
    student("llama", "ragged").save_pretrained(path)
    return path


@pytest.fixture
def adapter(base, tmp_path):
    """An adapter of a student of ``base``, with weights that no seed gives."""
    model = AutoModelForCausalLM.from_pretrained(base)
    dofla.linear.linearize(model, plan_for(model, "ragged"), seed=123)
    dofla.save_adapter(model, tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_the_stock_auto_class_opens_a_saved_student(family, kind, tmp_path):
    model = student(family, kind)
    model.save_pretrained(tmp_path)
    assert_same_student(AutoModelForCausalLM.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("family", ["bert", "roberta", "vit", "bart", "gpt2_crossing"])
def test_so_does_the_class_of_a_model_that_is_no_plain_decoder(family, tmp_path):
    model = student(family, "ragged")
    model.save_pretrained(tmp_path)
    for opened in (type(model).from_pretrained(tmp_path), dofla.load(tmp_path)):
        assert type(opened) is type(model)
        assert Converted.of(opened).plan.to_dict() == Converted.of(model).plan.to_dict()
        assert_close(opened.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("asked", ["eager", "sdpa", "dofla"])
def test_the_attention_asked_for_when_opening_is_that_of_the_teacher(folder, asked):
    opened = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=asked)
    assert_close(logits(opened), logits(student("llama", "ragged")), rtol=0, atol=0)
    with dofla.original(opened):
        assert computed_instead(opened.config) == asked.replace("dofla", "sdpa")
        assert_close(logits(opened), logits(teacher("llama")), **LOGITS)


@pytest.mark.parametrize(("family", "kind"), [*((family, "ragged") for family in CAUSAL), ("llama", "compressed")])
def test_an_adapter_and_its_base_give_the_student_again(family, kind, tmp_path):
    teacher(family).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    if kind == "compressed":
        compress(model, tokens(4, 48), tokens=48, head_budgets="even")
    else:
        dofla.linear.linearize(model, plan_for(model, kind), seed=123)
    dofla.save_adapter(model, tmp_path / "adapter")
    assert_same_student(dofla.load(tmp_path / "adapter"), model)


def test_an_adapter_holds_the_feature_maps_and_nothing_else(adapter):
    files = {ADAPTER, WEIGHTS, "config.json", "plan.json", "record.json", "README.md"}
    assert {path.name for path in adapter.iterdir()} == files
    model = dofla.load(adapter)
    held, maps = load_file(adapter / WEIGHTS), feature_map_tensors(model)
    assert held.keys() == maps.keys()
    assert sum(t.numel() for t in held.values()) < 0.1 * model.num_parameters()


def test_an_adapter_can_be_given_another_place_for_its_base(adapter, base, tmp_path):
    expected = logits(dofla.load(adapter))
    base.rename(tmp_path / "moved")
    with pytest.raises(dofla.DoflaError, match=r"adapter is the adapter of .*'.*base'.*; base_model=FOLDER_OR_NAME"):
        dofla.load(adapter)
    assert_close(logits(dofla.load(adapter, base_model=tmp_path / "moved")), expected, rtol=0, atol=0)
    pointer = json.loads((adapter / ADAPTER).read_text())
    (adapter / ADAPTER).write_text(json.dumps(pointer | {"base_model": str(tmp_path / "moved")}))
    assert_close(logits(dofla.load(adapter)), expected, rtol=0, atol=0)


def test_a_base_that_only_this_machine_has_is_named_with_a_warning(base, tmp_path, caplog):
    model = dofla.linear.linearize(AutoModelForCausalLM.from_pretrained(base))
    dofla.save_adapter(model, tmp_path / "adapter")
    (said,) = caplog.messages
    assert said.startswith(f"others cannot open {tmp_path / 'adapter'}, whose base model is the folder {base}: ")
    assert json.loads((tmp_path / "adapter" / ADAPTER).read_text())["base_model"] == str(base)
    dofla.note(tmp_path / "adapter", base_model="owner/name")  # as the warning says
    assert json.loads((tmp_path / "adapter" / ADAPTER).read_text())["base_model"] == "owner/name"


def test_a_base_that_is_known_to_be_on_the_hub_is_named_as_there(base, tmp_path, caplog):
    """Opened from the hub's cache; and opened elsewhere than an adapter says, and saved again."""
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / "0123"
    shutil.copytree(base, snapshot)
    model = dofla.linear.linearize(AutoModelForCausalLM.from_pretrained(snapshot))
    dofla.save_adapter(model, tmp_path / "first")
    dofla.save_adapter(dofla.load(tmp_path / "first", base_model=base), tmp_path / "second")
    for name in ("first", "second"):
        assert json.loads((tmp_path / name / ADAPTER).read_text())["base_model"] == "owner/name"
    assert not caplog.messages


def test_a_base_in_an_installed_package_is_named_by_it(tmp_path, caplog):
    """So that the adapter opens wherever the package is."""
    model = dofla.linear.linearize(load_model(model_path()))
    caplog.clear()  # a processor may be slow in its precision
    dofla.save_adapter(model, tmp_path / "adapter")
    named = json.loads((tmp_path / "adapter" / ADAPTER).read_text())["base_model"]
    assert named == "package:dofla/runs/demo/model"
    assert not caplog.messages
    assert_same_student(dofla.load(tmp_path / "adapter"), model)
    for package in ("no_such", "os.path", ""):
        with pytest.raises(dofla.DoflaError, match=rf"the package {package} is not installed: .*; base_model=FOLDER"):
            dofla.load(tmp_path / "adapter", base_model=f"package:{package}/folder")


def test_the_base_of_a_standalone_student_is_its_folder_whatever_that_was_made_from(base, tmp_path):
    model = dofla.linear.linearize(AutoModelForCausalLM.from_pretrained(base))
    dofla.note(model, base_model="owner/name")
    model.save_pretrained(tmp_path / "student")
    dofla.save_adapter(dofla.load(tmp_path / "student"), tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / ADAPTER).read_text())["base_model"] == str(tmp_path / "student")


def test_an_opened_student_can_be_saved_in_both_ways_again(folder, tmp_path):
    opened = AutoModelForCausalLM.from_pretrained(folder)
    opened.save_pretrained(tmp_path / "again")
    dofla.save_adapter(opened, tmp_path / "adapter")
    assert_same_student(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), opened)
    assert_same_student(dofla.load(tmp_path / "adapter"), opened)


def test_an_opened_student_gives_its_teacher_back(folder):
    opened, original = AutoModelForCausalLM.from_pretrained(folder), teacher("llama")
    with dofla.original(opened):
        assert_close(logits(opened), logits(original), rtol=0, atol=0)
    dofla.restore(opened)
    assert_close(logits(opened), logits(original), rtol=0, atol=0)
    assert opened.state_dict().keys() == original.state_dict().keys()
    opened.to(torch.bfloat16)
    assert {p.dtype for p in opened.parameters()} == {torch.bfloat16}


def test_a_restored_student_saves_as_its_teacher(folder, tmp_path):
    teacher("llama").save_pretrained(tmp_path / "teacher")
    dofla.restore(AutoModelForCausalLM.from_pretrained(folder)).save_pretrained(tmp_path / "restored")
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("teacher", "restored")]
    assert configs[0] == configs[1]
    assert load_file(tmp_path / "restored/model.safetensors").keys() == teacher("llama").state_dict().keys()


@torch.no_grad()
def test_the_body_of_a_student_can_be_saved_alone(tmp_path):
    original = own_student("llama", "ragged").model
    original.save_pretrained(tmp_path)
    opened = AutoModel.from_pretrained(tmp_path)
    assert_close(opened(tokens(2, 20))[0], original(tokens(2, 20))[0], rtol=0, atol=0)


def test_another_head_can_be_put_on_a_saved_student(folder):
    body = AutoModel.from_pretrained(folder)
    whole = student("llama", "ragged")
    ids = tokens(2, 20)
    with torch.no_grad():
        assert_close(body(ids).last_hidden_state, whole.model(ids).last_hidden_state, rtol=0, atol=0)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    assert classifier(ids).logits.shape == (2, 3)
    assert_close(feature_map_tensors(classifier), feature_map_tensors(whole), rtol=0, atol=0)


def test_a_head_can_be_put_on_a_saved_encoder(tmp_path):
    body = own_student("bert")
    body.save_pretrained(tmp_path)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert type(classifier) is BertForSequenceClassification
    ids = tokens(2, 20)
    with torch.no_grad():
        assert_close(classifier.bert(ids).pooler_output, body(ids).pooler_output, rtol=0, atol=0)
    assert sorted(Converted.of(classifier).layers) == [f"bert.encoder.layer.{n}.attention.self" for n in (0, 1)]
    classifier.save_pretrained(tmp_path / "tuned")
    again = dofla.load(tmp_path / "tuned")
    with torch.no_grad():
        assert_close(again(ids).logits, classifier(ids).logits, rtol=0, atol=0)


# What is wrong with a folder is said in one line


def assert_refused(path, match):
    with pytest.raises(dofla.DoflaError, match=match) as caught:
        dofla.load(path)
    assert "\n" not in str(caught.value)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def describe(adapter, **fields):
    """Change what an adapter says of itself, if it says anything."""
    path = adapter / ADAPTER
    if path.read_bytes().startswith(b"{"):
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda a: cut(a / WEIGHTS), rf"{WEIGHTS} is damaged"),
        (lambda a: (a / WEIGHTS).write_bytes(b""), rf"{WEIGHTS} is damaged"),
        (lambda a: (a / WEIGHTS).unlink(), rf"{WEIGHTS} does not exist"),
        (lambda a: (a / "plan.json").unlink(), "plan.json does not exist"),
        (lambda a: (a / "plan.json").write_text("{"), "plan.json is not a plan"),
        (lambda a: (a / ADAPTER).write_text("[1]"), rf"{ADAPTER} is not a dofla adapter"),
        (lambda a: describe(a, base_model=None), "names no base model"),
        (lambda a: describe(a, base_model="no/such/model/anywhere"), "is no folder, and no name that the hub"),
        (lambda a: describe(a, base_model=3), "base_model"),
        (lambda a: change_tensors(a / WEIGHTS, lambda t: t.popitem()), "is on one side only"),
        (
            lambda a: change_tensors(a / WEIGHTS, lambda t: t.update({k: v[:, :-1] for k, v in t.items()})),
            r"does not fit its plan: .*groups\.0",
        ),
        (lambda a: change_tensors(a / WEIGHTS, lambda t: next(iter(t.values())).fill_(torch.nan)), "NaN or infinity"),
    ],
    ids=[
        *["cut", "empty", "no weights", "no plan", "broken plan", "broken pointer", "no pointer", "pointer to nowhere"],
        *["pointer to a number", "missing tensor", "wrong shapes", "NaN"],
    ],
)
def test_a_damaged_adapter_is_refused(adapter, damage, match):
    damage(adapter)
    describe(adapter, sha256={path.name: sha256(path) for path in adapter.iterdir()})  # as if it had always been so
    assert_refused(adapter, match)


@pytest.mark.parametrize("name", [WEIGHTS, "plan.json", "lora.safetensors"])
def test_an_adapter_of_which_a_file_has_changed_is_refused(adapter, name):
    path = adapter / name
    content = bytearray(path.read_bytes() if path.exists() else b"of another adapter")
    content[-2] ^= 1
    path.write_bytes(content)
    assert_refused(adapter, rf"{name} is missing, damaged or edited \(its sha256 does not fit\): copy or make it again")


@pytest.mark.parametrize("format", [1, 3, 99, "2", None])
def test_an_adapter_of_another_format_or_without_checksums_is_refused(adapter, format):
    describe(adapter, sha256=None)
    assert_refused(adapter, rf"{ADAPTER} has no sha256: it is damaged, or of an earlier version: compress or distill")
    describe(adapter, format=format)
    assert_refused(adapter, rf"{ADAPTER} has format {format!r}, this version of dofla reads 2: open it with")


def rename_layers(folder):
    config = json.loads((folder / "config.json").read_text())
    layers = config["quantization_config"]["layers"]
    config["quantization_config"]["layers"] = {name.replace("self_attn", "attn"): x for name, x in layers.items()}
    (folder / "config.json").write_text(json.dumps(config))


MAP = "model.layers.1.self_attn.dofla.groups.0.map.z"
"""A feature map, of which the name is a pattern as well."""


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda f: cut(f / "model.safetensors"), "cannot load model"),
        (lambda f: (f / "model.safetensors").unlink(), "cannot load model"),
        (lambda f: (f / "config.json").unlink(), "has no config"),
        (lambda f: (f / "config.json").write_text("{"), "cannot load model"),
        (rename_layers, r"model\.layers\.0\.attn"),
        (lambda f: change_tensors(f / "model.safetensors", lambda t: t.pop(MAP)), MAP),
        (lambda f: change_tensors(f / "model.safetensors", lambda t: t.update({MAP: t[MAP][:, 1:].clone()})), MAP),
    ],
    ids=["cut", "no weights", "no config", "broken config", "other names", "missing feature map", "wrong shape"],
)
def test_a_damaged_standalone_student_is_refused(folder, tmp_path, damage, match):
    copied = without_checksums(shutil.copytree(folder, tmp_path / "copy"))
    damage(copied)
    assert_refused(copied, match)


def test_a_class_that_transformers_does_not_have_is_refused(adapter, base, tmp_path):
    with pytest.raises(
        dofla.DoflaError, match=r"opens as \w+ and is to be a float32, which transformers .* does not have"
    ):
        load_model(base, class_name="float32")
    with pytest.raises(TypeError):
        load_model(base, "float32")


def test_what_is_no_student_is_refused(base, tmp_path):
    assert_refused(base, "is a plain model")
    assert_refused(tmp_path / "nothing", "is not a folder")


def test_an_adapter_takes_the_place_of_another_as_a_whole(adapter, monkeypatch):
    before = (adapter / WEIGHTS).read_bytes()
    (adapter / "tokenizer.json").write_text("mine")
    (adapter / "lora.safetensors").write_text("of another student")
    (adapter / "inside").mkdir()
    (adapter / "inside" / WEIGHTS).write_text("of an adapter in there")
    other = student("llama")
    with monkeypatch.context() as broken:
        broken.setattr(checkpoint, "write_card", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dofla.save_adapter(other, adapter)
    assert (adapter / WEIGHTS).read_bytes() == before
    assert (adapter / "lora.safetensors").exists()
    dofla.save_adapter(other, adapter)
    assert (adapter / "tokenizer.json").read_text() == "mine"
    assert (adapter / "inside" / WEIGHTS).read_text() == "of an adapter in there"
    assert not (adapter / "lora.safetensors").exists()
    assert (adapter / "README.md").read_text().startswith("---")
    assert not [path for path in adapter.parent.iterdir() if "partial" in path.name]


def test_an_adapter_is_not_written_over_anything_else_and_a_softmax_model_has_none(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("kept")
    with pytest.raises(dofla.DoflaError, match="mine exists already: choose another output folder or remove it"):
        dofla.save_adapter(student("llama"), tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    with pytest.raises(dofla.DoflaError, match="not converted"):
        dofla.save_adapter(teacher("llama"), tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
