"""``dofla frontier``: how many bytes a text needs."""

from __future__ import annotations

import json

from command_line import call

WORDS = "old king queen sea ship storm went came saw said that the a to of home gold"


def test_gaps_by_bytes_and_length(tmp_path, capsys):
    words = WORDS.split()
    texts = [" ".join(words[(n * k) % len(words)] for k in range(1, 90)) for n in range(1, 40)]
    (tmp_path / "text.txt").write_text("\n\n".join(texts))
    options = ["--lengths", 32, "--lengths", 48, "--budgets", 12, "--budgets", 24, "--windows", 2]
    assert call("frontier", "demo", "--data", tmp_path / "text.txt", *options, "--out", tmp_path / "f.json") == 0
    found = json.loads((tmp_path / "f.json").read_text())
    assert [(x["budget"], x["length"]) for x in found["points"]] == [(12, 32), (12, 48), (24, 32), (24, 48)]
    assert "gap to the original" in capsys.readouterr().out
    assert call("frontier", "demo", "--data", tmp_path / "text.txt", "--out", tmp_path / "f.json") == 2
