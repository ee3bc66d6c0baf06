"""``dofla generate`` without a prompt: from a pipe it is read, on a terminal something else is for that."""

from __future__ import annotations

import io
import json
import sys

from command_line import call
from served_models import small


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_prompt_comes_from_a_pipe_or_an_option(tiny, tokenizer, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "compressed"
    small(tiny).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert call("generate", folder, "--new-tokens", 3, "--prompt", "Once upon\na time", "--json") == 0
    given = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon\na time\n"))
    assert call("generate", folder, "--new-tokens", 3, "--json") == 0
    assert json.loads(capsys.readouterr().out) == given
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert call("generate", folder) == 2
    message = "no text to continue: give --prompt TEXT, pipe a text in, or start dofla chat"
    assert capsys.readouterr().err == f"dofla: {message}\n"
    assert call("generate", folder, "--prompt", "w1", "--set", "seed=-1") == 2
    assert capsys.readouterr().err == "dofla: seed is -1: give 0 or more\n"
