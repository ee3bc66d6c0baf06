"""``dofla calibrate`` and ``dofla compress``: a calibration, a whole model, an adapter, and what is said of them."""

import json
import math
import re

import pytest
from command_line import call, refused
from transformers import AutoModelForCausalLM, AutoTokenizer
from word_tokenizers import WORDS

import dofla
from dofla.integration.converted import Converted

SIZE = 102 * 1024
SHORT = ["--size", "102KiB", "--set", "windows=2", "--set", "length=32"]


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    """A file, with ranked retrieval heads."""
    path = tmp_path_factory.mktemp("calibrated") / "calibration.safetensors"
    short = ["--data", "sample", "--set", "windows=12", "--set", "length=48", "--set", "context=256"]
    assert call("calibrate", "demo", *short, "--out", path) == 0
    return path


def test_a_calibration_serves_any_size(calibration, tmp_path, capsys):
    assert len(dofla.Calibration.load(calibration).retrieval) == 32
    for size in (SIZE, 2 * SIZE):
        words = ["compress", "demo", "--calibration", calibration, "--size", f"{size}B", "--json"]
        assert call(*words, "--adapter", tmp_path / str(size)) == 0
        found = json.loads(capsys.readouterr().out)
        assert 0.9 * size < found["state_bytes"] <= size
        assert found["made_by"]["held_out"].keys() == {"even", "eviction", "reading"}


def test_a_whole_model_and_an_adapter_are_written_and_what_they_are_is_said(tmp_path, capsys):
    whole, adapter = tmp_path / "whole", tmp_path / "adapter"
    assert call("compress", "demo", *SHORT, "--set", "head_budgets=even", "--out", whole, "--adapter", adapter) == 0
    said = capsys.readouterr().out
    for word in ("compressed model written to", "adapter written to", "on disk", f"next: dofla evaluate {whole}"):
        assert word in " ".join(said.split())
    models = [AutoModelForCausalLM.from_pretrained(whole), dofla.load(adapter)]
    plans = [Converted.of(model).plan for model in models]
    assert plans[0].to_dict() == plans[1].to_dict()
    assert plans[0].state_bytes(models[0].dtype) <= SIZE
    assert not list(adapter.glob("model*.safetensors"))
    for folder in (whole, adapter):
        assert AutoTokenizer.from_pretrained(folder).vocab_size > 1000
        card = " ".join((folder / "README.md").read_text().split())
        assert "older ones in 3 bits" in card
        assert "heavy hitters stay and the others are evicted" in card
        assert "Nothing was trained: the cache was calibrated" in card
        assert call("generate", folder, "--prompt", "Once upon a time", "--new-tokens", 4) == 0
        assert capsys.readouterr().out.strip()


def test_text_that_calibration_did_not_read_is_read_whole(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("text", "other"):
        sentences = (f"One day the {name} saw {word}, and {word} ran home." for word in WORDS)
        (tmp_path / f"{name}.txt").write_text("\n\n".join(sentences))
    made_from = ["--data", "text.txt", "--set", "windows=2", "--set", "length=16", "--set", "head_budgets=even"]
    assert call("compress", "demo", "--size", "102KiB", *made_from, "--out", "compressed") == 0
    assert dofla.load("compressed").config.quantization_config.record.calibration == "text.txt (train), 32 tokens"
    for words, source, part in (
        (["text.txt"], "text.txt (validation)", "the held-out part of text.txt"),
        (["other.txt", "--windows", 1000], "other.txt (all)", "other.txt"),
        (["other.txt", "--windows", 3], "other.txt (all)", None),
        (["text.txt", "--split", "all", "--windows", 4], "text.txt (all)", None),
        (["text.txt", "--split", "train", "--windows", 1000], "text.txt (train)", "the training part of text.txt"),
        (["demo", "--windows", 4], "demo: own samples and recall documents (validation)", None),
    ):
        capsys.readouterr()
        assert call("evaluate", "compressed", "--length", 16, "--data", *words) == 0
        said = capsys.readouterr().out
        asked, found, windows = re.match(r"(?:(.*)\n)?((\d+) windows of 16 tokens: .*)\n", said).groups()
        assert found == f"{windows} windows of 16 tokens: {source}"
        assert (asked is None) == (part is None)
        assert part is None or re.fullmatch(rf"{windows} of (64|1000) windows asked: {part} has no more", asked)
        assert ("(95 % interval " in said) == (int(windows) >= 4)
    assert call("evaluate", "compressed", "--data", "text.txt", "--split", "test") == 2
    assert "unknown split 'test': choose one of all, validation, train" in capsys.readouterr().err


def test_heads_that_hold_every_token_are_found(calibration, tmp_path, capsys):
    words = ["compress", "demo", "--size", "204KiB", "--set", "context=256", "--set", "retrieval_heads=1"]
    assert call(*words, "--calibration", calibration, "--adapter", tmp_path / "compressed") == 0
    plan = Converted.of(dofla.load(tmp_path / "compressed")).plan
    ((name, (head,)),) = plan.made_by["retrieval_heads"].items()
    assert f"retrieval heads: {name} {head}\n" in capsys.readouterr().out
    assert plan[name].slots[head] == math.inf
    assert call("compress", "demo", "--no-evict", "--calibration", calibration, "--out", tmp_path / "whole") == 0
    assert "of 32 KV heads that hold every token" in " ".join(capsys.readouterr().out.split())
    card = " ".join((tmp_path / "whole" / "README.md").read_text().split())
    assert "32 KV heads hold every token" in card
    assert "at 1,024 tokens; the" in card
    assert "evicted" not in card
    assert call("generate", tmp_path / "whole", "--prompt", "Once upon a time", "--new-tokens", 4) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "102KiB"], "nowhere to write: give --out FOLDER for a whole model, or --adapter FOLDER"),
        (["--out", "NEW", "--calibration", "CALIBRATION", "--data", "sample"], "are both given: give one of them"),
        (["--out", "NEW", "--calibration", "none.safetensors"], "none.safetensors does not exist"),
        (["--out", "NEW", *SHORT, "--ratio", "16"], "give one of them"),
        (["--out", "HERE"], "exists already"),
        (["--adapter", "HERE"], "exists already"),
        (["--adapter", "NEW", "--out", "NEW"], "give two folders, neither of them inside the other"),
        (["--adapter", "NEW", "--out", "INSIDE"], "give two folders, neither of them inside the other"),
        (["--adapter", "INSIDE", "--out", "NEW"], "give two folders, neither of them inside the other"),
    ],
)
def test_what_is_refused_leaves_nothing(calibration, tmp_path, capsys, words, message):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine.txt").write_text("kept")
    places = {"NEW": tmp_path / "new", "HERE": tmp_path / "here", "CALIBRATION": calibration}
    places["INSIDE"] = tmp_path / "new" / "inside"
    assert message in refused(capsys, "compress", "demo", *(places.get(word, word) for word in words))
    assert [path.name for path in tmp_path.rglob("*")] == ["here", "mine.txt"]


def test_the_next_command_has_what_this_one_was_given(tmp_path, capsys):
    layer = "model.layers.0.self_attn"
    given = ["--set", f"keep_softmax={layer}", "--set", "context=256"]
    assert call("check", "demo", *given) == 0
    out = tmp_path / "calibration.safetensors"
    assert call("calibrate", "demo", "--data", "sample", *SHORT[2:], *given, "--out", out) == 0
    for command in re.findall("next: dofla (.*)", capsys.readouterr().out):
        assert f"--set context=256 --set keep_softmax={layer}" in command
        words = [tmp_path / word if word == "compressed" else word for word in command.split()]
        (index,) = (n for n, word in enumerate(words) if word == "--ratio")
        words[index + 1] = 4
        if "--calibration" in words:
            assert call(*words) == 0
    plan = Converted.of(AutoModelForCausalLM.from_pretrained(tmp_path / "compressed")).plan
    assert layer not in [own.name for own in plan.converted]
