"""``dofla check``: what becomes of a model, from its config."""

from __future__ import annotations

import json

from command_line import call


def test_a_model_is_told_of_for_people_and_for_programs(capsys):
    assert call("check", "demo", "--size", "102KiB", "--size", "272KiB") == 0
    shown = capsys.readouterr().out
    assert "LlamaForCausalLM, 4.07 M parameters: supported" in shown
    assert "an estimate" in shown
    assert call("check", "demo", "--size", "272KiB", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["supported"]
    assert [(x["tokens"], x["size"]) for x in found["cache"]] == [(n, 278_528) for n in (2048, 8192, 32768)]
    assert found["cache"][0]["factor"] > 10
