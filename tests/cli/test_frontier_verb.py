"""``dofla frontier``: how many bytes a text needs."""

import json
import shlex

import pytest
from command_line import call

from dofla.plans.plan import Plan

WORDS = "old king queen sea ship storm went came saw said that the a to of home gold"
OPTIONS = ["--lengths", 32, "--lengths", 48, "--set", "windows=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With two texts."""
    words, folder = WORDS.split(), tmp_path_factory.mktemp("texts")
    for name, step in (("text", 1), ("other", 2)):
        texts = [" ".join(words[(n * k) % len(words)] for k in range(1, 90)) for n in range(step, 40)]
        (folder / f"{name}.txt").write_text("\n\n".join(texts))
    return folder


@pytest.mark.slow
def test_quality_by_bytes_length_and_text(folder, tmp_path, capsys):
    texts = ["--data", folder / "text.txt", "--text", folder / "text.txt", "--text", folder / "other.txt"]
    out = tmp_path / "out"
    assert call("frontier", "demo", *texts, *OPTIONS, "--sizes", "51KiB", "--sizes", "102KiB", "--out", out) == 0
    found = json.loads((out / "frontier.json").read_text())
    tried = [(x["size"], x["text"], x["length"]) for x in found["points"]]
    assert tried == [(b, text, n) for b in (51 * 1024, 102 * 1024) for text in ("text", "other") for n in (32, 48)]
    assert found["made_from"]["tokens"] > 0
    assert found["evaluated"] == {
        "text": f"{folder / 'text.txt'} (validation)",
        "other": f"{folder / 'other.txt'} (all)",
    }
    said = capsys.readouterr().out
    assert "loss increase and KL, nats per token" in said
    assert "compressed/104448 (" in "".join(said.split("\n"))
    assert (out / "report.html").exists()
    assert call("report", out) == 0  # and again
    assert call("frontier", "demo", "--data", folder / "text.txt", "--out", out) == 2


@pytest.mark.slow
def test_the_command_that_is_said_makes_the_model(folder, tmp_path, capsys, monkeypatch):
    texts = ["--data", folder / "text.txt", "--text", folder / "other.txt"]
    asked = [*texts, *OPTIONS, "--set", "context=520", "--sizes", "51KiB", "--target", 50]
    assert call("frontier", "demo", *asked, "--out", tmp_path / "out") == 0
    capsys.readouterr()
    assert call("frontier", "demo", *asked) == 0
    said = capsys.readouterr().out
    command = shlex.split(said[said.index("dofla compress") :])
    assert command[:5] == ["dofla", "compress", "demo", "--size", "52224"]
    assert "context=520" in command
    monkeypatch.chdir(tmp_path)
    assert call(*("--adapter" if word == "--out" else word for word in command[1:])) == 0
    made, kept = tmp_path / "compressed-52224", tmp_path / "out" / "compressed" / "52224"
    assert Plan.load(made).to_dict() == Plan.load(kept).to_dict()
    (weights,) = kept.glob("*.safetensors")
    assert (made / weights.name).read_bytes() == weights.read_bytes()
