"""``dofla fade``: an adapter at once, which says what it is."""

from __future__ import annotations

import json

from command_line import call
from transformers import AutoTokenizer

import dofla
from dofla.integration.surgery import plan_of


def test_a_model_fades_at_once(tmp_path, capsys):
    words = ["fade", "demo", "--budget", 24, "--windows", 2, "--length", 32, "--out", tmp_path / "faded"]
    assert call(*words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    student = dofla.load(tmp_path / "faded")
    plan = plan_of(student)
    assert found["state_bytes"] == plan.state_bytes(student.dtype) <= 24 * (32 + 2) * 4 * 32
    assert all(layer.stages and layer.feature_map == "none" for layer in plan.layers)
    card = (tmp_path / "faded" / "README.md").read_text()
    assert "in ever fewer bits as they age, keeps of the old ones those that draw attention." in card
    assert "Nothing was trained: means, directions and bits" in card
    assert "@ 3 bits" in card
    assert " kept" in card
    assert AutoTokenizer.from_pretrained(tmp_path / "faded").vocab_size > 1000
    assert call("generate", tmp_path / "faded", "--prompt", "Once upon a time", "--new-tokens", 4) == 0
    assert capsys.readouterr().out.strip()


def test_heads_that_hold_every_token_are_found(tmp_path, capsys):
    words = ["fade", "demo", "--budget", 48, "--windows", 4, "--length", 64, "--reach", 256, "--retrieval-heads", 1]
    assert call(*words, "--out", tmp_path / "faded") == 0
    plan = plan_of(dofla.load(tmp_path / "faded"))
    ((name, (head,)),) = plan.made_by["retrieval_heads"].items()
    assert plan[name].places_per_head[head] == 256
    assert f"KV heads that hold every token: {name} {head}\n" in capsys.readouterr().out
    assert call(*words, "--shares", "even", "--out", tmp_path / "other") == 2
    assert "retrieval_heads is 1: they are found when shares are measured" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_what_is_there_is_not_written_over(tmp_path, capsys):
    (tmp_path / "faded").mkdir()
    (tmp_path / "faded" / "mine.txt").write_text("kept")
    assert call("fade", "demo", "--out", tmp_path / "faded") == 2
    assert "exists" in capsys.readouterr().err
    assert (tmp_path / "faded" / "mine.txt").read_text() == "kept"
