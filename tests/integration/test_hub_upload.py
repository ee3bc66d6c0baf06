"""Students on the hub: what goes up, what stays there, and what comes back, through huggingface_hub's own code."""

import json
from pathlib import Path

import pytest
import torch
import transformers.utils.hub
from hub_stand_in import serving
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file
from tiny_families import own_student, plan_for, teacher, tokens
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner
from word_tokenizers import word_tokenizer

import dofla
from dofla.cli import app
from dofla.integration import hub as hub_module
from dofla.integration.checkpoint import feature_map_tensors, load_any
from dofla.integration.converted import Converted, is_converted
from dofla.runs.opening import open_converted

CHECKPOINT = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
ADAPTER = {"config.json", "dofla_adapter.json", "dofla.safetensors", "plan.json", "record.json", "README.md"}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with serving() as (hub, address):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)  # which keeps the address
        yield hub
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)


@pytest.fixture
def base(hub):
    """The name of a llama teacher on the hub, with a license."""
    model = teacher("llama")
    model.push_to_hub("owner/base")
    card = hub.repositories["owner/base"]["README.md"].decode()
    hub.repositories["owner/base"]["README.md"] = card.replace("---\n", "---\nlicense: apache-2.0\n", 1).encode()
    hub.commits.clear()
    return "owner/base"


@pytest.fixture
def student(base):
    """A student of ``base``, with weights that no seed gives."""
    model = AutoModelForCausalLM.from_pretrained(base)
    return dofla.linear.linearize(model, plan_for(model, "ragged"), seed=123)


@torch.no_grad()
def assert_same(opened, student):
    assert Converted.of(opened).plan.to_dict() == Converted.of(student).plan.to_dict()
    ids = tokens(2, 20)
    assert_close(opened(ids).logits, student(ids).logits, rtol=0, atol=0)


def card_of(hub, name):
    return ModelCard(hub.repositories[name]["README.md"].decode())


def test_a_student_is_pushed_whole_and_opens_by_its_name(hub, student):
    student.push_to_hub("me/student", tags=["stories"])
    (commit,) = hub.commits
    assert set(commit["added"]) == CHECKPOINT
    assert not commit["deleted"]
    card = card_of(hub, "me/student")
    assert card.data.base_model == "owner/base"
    assert card.data.license == "apache-2.0"
    assert {"dofla", "stories"} <= set(card.data.tags)
    assert 'from_pretrained("me/student")' in card.text
    assert_same(AutoModelForCausalLM.from_pretrained("me/student"), student)
    opened = dofla.load("me/student")
    assert_same(opened, student)
    assert Converted.of(opened).record.base_model == "owner/base"


def test_pushing_again_brings_the_card_up_to_date(hub, student):
    student.push_to_hub("me/student")
    dofla.note(student, figures=dofla.evaluate(student, tokens(4, 24)), command="python judge.py")
    student.push_to_hub("me/student")
    card = card_of(hub, "me/student")
    assert "python judge.py" in card.text
    metrics = {"loss", "perplexity", "loss_increase", "kl", "agreement"}
    assert {result.metric_type for result in card.data.eval_results} == metrics


def test_a_card_that_someone_wrote_on_the_hub_stays(hub, student):
    hub.create("me/student")
    hub.repositories["me/student"]["README.md"] = b"---\nlicense: mit\n---\n\nMine.\n"
    student.push_to_hub("me/student")
    assert card_of(hub, "me/student").text.strip() == "Mine."
    student.push_to_hub("me/other")
    hub.repositories["me/other"]["README.md"] += b"\nAnd a word of mine.\n"
    student.push_to_hub("me/other")
    assert "And a word of mine." in card_of(hub, "me/other").text


def test_saving_with_a_push_leaves_foreign_files_and_a_card_written_here_alone(hub, student, tmp_path):
    folder = tmp_path / "student"
    folder.mkdir()
    (folder / "notes.txt").write_text("private")
    (folder / "README.md").write_text("Written by hand.\n")
    student.save_pretrained(folder, push_to_hub=True, repo_id="me/student")
    (commit,) = hub.commits
    assert set(commit["added"]) == CHECKPOINT
    assert commit["added"]["README.md"] == b"Written by hand.\n"
    assert (folder / "README.md").read_text() == "Written by hand.\n"
    student.save_pretrained(tmp_path / "new", push_to_hub=True, repo_id="me/another")
    assert "dofla.original(model)" in card_of(hub, "me/another").text
    assert "dofla.original(model)" in (tmp_path / "new" / "README.md").read_text()


def test_a_pull_request_goes_where_it_was_asked_to(hub, student):
    student.push_to_hub("me/student", create_pr=True, commit_message="Please")
    dofla.push_adapter(student, "me/adapter", create_pr=True, commit_message="Please")
    assert [(commit["summary"], commit["query"]) for commit in hub.commits] == [("Please", "create_pr=1")] * 2


def test_an_adapter_is_pushed_alone_and_opens_by_its_name(hub, student):
    dofla.push_adapter(student, "me/adapter")
    (commit,) = hub.commits
    assert set(commit["added"]) == ADAPTER
    assert json.loads(commit["added"]["dofla_adapter.json"])["base_model"] == "owner/base"
    card = card_of(hub, "me/adapter")
    assert card.data.base_model == "owner/base"
    assert 'dofla.load("me/adapter")' in card.text
    opened = dofla.load("me/adapter")
    assert_same(opened, student)
    assert Converted.of(opened).record == Converted.of(student).record
    assert "GET /me/adapter/resolve/main/README.md" not in hub.asked  # nor anything else that is not needed


@pytest.mark.slow
@pytest.mark.parametrize("moved", [False, True], ids=["base where it was", "base elsewhere"])
def test_every_verb_opens_a_student_by_its_name(hub, student, moved, tmp_path):
    word_tokenizer((f"w{n}" for n in range(64)), "w0", eos_token="w0", pad_token="w0").save_pretrained(tmp_path)
    hub.repositories["owner/base"] |= {path.name: path.read_bytes() for path in tmp_path.glob("tokenizer*")}
    dofla.push_adapter(student, "me/adapter")
    items = [{"question": f"w{n}", "choices": ["w1", "w2"], "answer": n % 2} for n in range(3, 9)]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, items)))
    if moved:
        hub.repositories["owner/moved"] = hub.repositories.pop("owner/base")
    base = ["--set", "base_model=owner/moved"] if moved else []
    for verb, *options in (
        ["generate", "--prompt", "w3 w4", "--new-tokens", 4],
        ["evaluate", "--tasks", tmp_path / "test.jsonl"],
    ):
        done = CliRunner().invoke(app, [verb, "me/adapter", *base, *map(str, options)])
        assert done.exit_code == 0, (verb, done.exception)
    assert not is_converted(open_converted("owner/moved" if moved else "owner/base", load=load_any)[0])


def test_an_adapter_opens_from_the_cache_when_the_hub_is_gone(hub, student, monkeypatch):
    dofla.push_adapter(student, "me/adapter")
    dofla.load("me/adapter")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert_same(dofla.load("me/adapter"), student)


def test_a_revision_is_the_adapters_and_a_token_goes_with_every_request(hub, student, monkeypatch):
    dofla.push_adapter(student, "me/adapter")
    asked = []
    download, read = hub_module.snapshot_download, AutoConfig.from_pretrained
    monkeypatch.setattr(
        hub_module, "snapshot_download", lambda *a, **k: asked.append(k) or download(*a, **k | {"revision": "main"})
    )
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *a, **k: asked.append(k) or read(*a, **k))
    assert_same(dofla.load("me/adapter", revision="v2", token="hf_of_mine"), student)
    adapter, base, *_ = asked
    assert (adapter["revision"], adapter["token"]) == ("v2", "hf_of_mine")
    assert ("revision" in base, base["token"]) == (False, "hf_of_mine")


def test_an_adapter_pushed_over_another_leaves_nothing_of_it(hub, student):
    dofla.push_adapter(student, "me/adapter")
    hub.repositories["me/adapter"] |= {"lora.safetensors": b"old", "tokenizer.json": b"{}", "README.md": b"Mine.\n"}
    hub.commits.clear()
    dofla.push_adapter(student, "me/adapter")
    (commit,) = hub.commits
    assert commit["deleted"] == ["lora.safetensors"]
    assert "README.md" not in commit["added"]
    assert hub.repositories["me/adapter"]["README.md"] == b"Mine.\n"
    assert set(hub.repositories["me/adapter"]) == ADAPTER | {"tokenizer.json"}


def test_an_adapter_of_a_base_that_nobody_else_has_is_refused(hub, tmp_path):
    teacher("llama").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    dofla.linear.linearize(model, plan_for(model))
    with pytest.raises(dofla.DoflaError, match=r"which others do not have: dofla\.note"):
        dofla.push_adapter(model, "me/adapter")
    assert not hub.commits
    assert "me/adapter" not in hub.repositories
    hub.create("owner/base")
    dofla.note(model, base_model="owner/base")
    dofla.push_adapter(model, "me/adapter")
    assert json.loads(hub.repositories["me/adapter"]["dofla_adapter.json"])["base_model"] == "owner/base"
    assert str(tmp_path) not in "".join(map(str, hub.repositories["me/adapter"].values()))


def test_a_base_elsewhere_can_be_named_when_an_adapter_is_opened(hub, student, tmp_path):
    dofla.push_adapter(student, "me/adapter")
    teacher("llama").save_pretrained(tmp_path / "copy")
    del hub.repositories["owner/base"]
    assert_same(dofla.load("me/adapter", base_model=tmp_path / "copy"), student)


SHIPPED = sorted((Path(__file__).parents[2] / "docs" / "students").glob("*/dofla_adapter.json"))


@pytest.mark.parametrize("pointer", SHIPPED, ids=[path.parent.name for path in SHIPPED])
def test_a_student_in_the_repository_opens_by_what_it_names(hub, pointer, tmp_path, monkeypatch):
    """With a model in the place of its base, whose attention has the same shapes and all else is small."""
    plan = dofla.linear.Plan.load(pointer.parent / "plan.json")
    layer = plan.layers[0]
    sizes = {"hidden_size": 4 * layer.kv_heads, "head_dim": layer.head_dim, "num_hidden_layers": len(plan.layers)}
    sizes |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), layer.kv_heads)
    name = json.loads(pointer.read_text())["base_model"]
    LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=16, vocab_size=64)).push_to_hub(name)
    monkeypatch.chdir(tmp_path)
    student = dofla.load(pointer.parent)
    assert any(x.startswith(f"GET /{name}/") and x.endswith("/model.safetensors") for x in hub.asked)
    assert feature_map_tensors(student).keys() == load_file(pointer.parent / "dofla.safetensors").keys()


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("me/none", "the hub does not give it"),
        ("a/b/c", "is not a folder: pass"),
        ("owner/base", "owner/base is neither an adapter nor a converted checkpoint"),
    ],
)
@pytest.mark.usefixtures("base")
def test_what_is_no_student_on_the_hub_is_refused_in_one_line(name, match):
    with pytest.raises(dofla.DoflaError, match=match) as caught:
        dofla.load(name)
    assert "\n" not in str(caught.value)


def test_a_restored_model_is_pushed_as_any_other(hub):
    model = dofla.restore(own_student("llama"))
    model.push_to_hub("me/plain")
    assert "dofla" not in hub.repositories["me/plain"]["README.md"].decode()
