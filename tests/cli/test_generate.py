"""``dofla generate`` without a prompt: from a pipe it is read, on a terminal something else is for that."""

from __future__ import annotations

import io
import json
import sys

from command_line import call
from students import reader_of


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_prompt_comes_from_a_pipe(tiny, tokenizer, tmp_path, monkeypatch, capsys):
    student = tmp_path / "student"
    reader_of(tiny).save_pretrained(student)
    tokenizer.save_pretrained(student)
    assert call("generate", student, "--new-tokens", 3, "--prompt", "Once upon\na time", "--json") == 0
    given = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon\na time\n"))
    assert call("generate", student, "--new-tokens", 3, "--json") == 0
    assert json.loads(capsys.readouterr().out) == given
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert call("generate", student) == 2
    message = "no text to continue: give --prompt TEXT, pipe a text in, or start dofla chat"
    assert capsys.readouterr().err == f"dofla: {message}\n"
