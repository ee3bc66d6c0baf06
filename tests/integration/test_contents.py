"""Whatever is named as a model: each function that opens one says what it is instead."""

import json
import shutil

import pytest
from tiny_families import teacher, tokens
from transformers import AutoModel, AutoModelForCausalLM

import dofla
from dofla.errors import DoflaError
from dofla.integration.checkpoint import load_any
from dofla.integration.contents import AdapterConfig
from dofla.runs.check import target_of
from dofla.runs.demo import model_path
from dofla.runs.opening import load_tokenizer, open_original


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Folders that are no originals."""
    home = tmp_path_factory.mktemp("contents")
    for name in ("gguf", "peft", "empty"):
        (home / name).mkdir()
    (home / "gguf" / "model.gguf").touch()
    (home / "peft" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/base"}))
    teacher("llama").save_pretrained(home / "base")
    model = load_any(home / "base")
    dofla.compress(model, tokens(2, 32), head_budgets="even", ratio=8)
    dofla.save_adapter(model, home / "adapter")
    model.save_pretrained(home / "whole")
    return home


@pytest.mark.parametrize("opened_by", [open_original, dofla.check, target_of])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gguf", "holds a GGUF file: open it with AutoModelForCausalLM.from_pretrained.*gguf_file"),
        ("gguf/model.gguf", "holds a GGUF file"),
        ("peft", "is an adapter of peft for owner/base: merge it"),
        ("adapter", "is an adapter of .*/base: dofla.load opens it; to compress anew, give .*/base"),
        ("whole", "is compressed or linearized already: give its base model"),
        ("empty", "has no config.json: give that of a model"),
        ("peft/adapter_config.json", "is a file: give the folder of a model"),
        ("a/b/c", "is no folder, and no name that the hub could have"),
    ],
)
def test_an_original_is_wanted_and_something_else_is_there(home, opened_by, name, message):
    with pytest.raises(DoflaError, match=message):
        opened_by(str(home / name))


def test_transformers_is_told_that_a_folder_is_an_adapter(home, tokenizer, tmp_path):
    for kind in (AutoModelForCausalLM, AutoModel):
        with pytest.raises(DoflaError, match=r"adapter is an adapter of .*/base: dofla\.load opens it"):
            kind.from_pretrained(home / "adapter")
    with pytest.raises(
        DoflaError, match=r"me/adapter is an adapter: dofla\.load opens it"
    ):  # as a name on the hub has it
        AutoModel.from_config(AdapterConfig(name_or_path="me/adapter"))
    tokenizer.save_pretrained(tmp_path)
    shutil.copy(home / "adapter" / "config.json", tmp_path)
    assert load_tokenizer(tmp_path).get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("name", ["gguf", "peft", "empty"])
def test_a_model_of_either_kind_is_wanted_and_none_is_there(home, name):
    with pytest.raises(DoflaError, match=r"GGUF|peft|config\.json"):
        dofla.load(home / name)


def test_a_folder_without_a_tokenizer_is_told_from_one_with_an_empty_one(home, tmp_path):
    with pytest.raises(DoflaError, match=r"no tokenizer in .*/base: the folder holds none: copy that of its base"):
        open_original(str(home / "base"))
    shutil.copytree(model_path(), tmp_path / "other")
    assert load_tokenizer(home / "base", tmp_path / "other").vocab_size == 2048


def test_what_a_request_gets_wrong_is_said_without_weights(home):
    for options, message in (({"context": 99_999}, "the model has"), ({"keep_softmax": ["x"]}, "names 'x'")):
        with pytest.raises(DoflaError, match=message):
            target_of(str(home / "base"), **options)
    target = target_of(str(home / "base"))
    with pytest.raises(DoflaError, match="ratio is 0: give"):
        target.size(None, 0)
