"""``dofla compress``: an adapter without training, and its card."""

from __future__ import annotations

import json

from command_line import call
from transformers import AutoModelForCausalLM, AutoTokenizer

import dofla
from dofla.integration.student import Student


def test_an_adapter_is_written(tmp_path, capsys):
    words = ["compress", "demo", "--size", "102KiB", "--windows", 2, "--length", 32, "--out", tmp_path / "compressed"]
    assert call(*words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    student = dofla.load(tmp_path / "compressed")
    plan = Student.of(student).plan
    assert found["state_bytes"] == plan.state_bytes(student.dtype) <= 102 * 1024
    assert all(layer.tiers and layer.feature_map == "none" for layer in plan.layers)
    card = (tmp_path / "compressed" / "README.md").read_text()
    assert "older ones in 3 bits" in " ".join(card.split())
    assert "heavy hitters stay and the others are evicted" in " ".join(card.split())
    assert "Nothing was trained: the cache was calibrated" in card
    assert AutoTokenizer.from_pretrained(tmp_path / "compressed").vocab_size > 1000
    assert call("generate", tmp_path / "compressed", "--prompt", "Once upon a time", "--new-tokens", 4) == 0
    assert capsys.readouterr().out.strip()


def test_a_whole_model_is_written(tmp_path, capsys):
    words = ["compress", "demo", "--size", "102KiB", "--windows", 2, "--length", 32, "--out", tmp_path / "whole"]
    assert call(*words, "--merged", "--head-budgets", "even", "--json") == 0
    assert json.loads(capsys.readouterr().out)["folder"] == str(tmp_path / "whole")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert Student.of(model).plan.state_bytes(model.dtype) <= 102 * 1024


def test_heads_that_hold_every_token_are_found(tmp_path, capsys):
    words = [
        "compress",
        "demo",
        "--size",
        "204KiB",
        "--windows",
        4,
        "--length",
        64,
        "--context",
        256,
        "--retrieval-heads",
        1,
    ]
    assert call(*words, "--out", tmp_path / "compressed") == 0
    plan = Student.of(dofla.load(tmp_path / "compressed")).plan
    ((name, (head,)),) = plan.made_by["retrieval_heads"].items()
    assert plan[name].slots_per_head[head] == 256
    assert f"KV heads that hold every token: {name} {head}\n" in capsys.readouterr().out
    assert call(*words, "--head-budgets", "even", "--out", tmp_path / "other") == 2
    assert "retrieval_heads is 1: they are found when head budgets are measured" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_what_is_there_is_not_written_over(tmp_path, capsys):
    (tmp_path / "compressed").mkdir()
    (tmp_path / "compressed" / "mine.txt").write_text("kept")
    assert call("compress", "demo", "--out", tmp_path / "compressed") == 2
    assert "exists" in capsys.readouterr().err
    assert (tmp_path / "compressed" / "mine.txt").read_text() == "kept"
