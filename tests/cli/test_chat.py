"""``dofla chat`` and ``dofla generate``: from a pipe and from a terminal, with and without a compressed cache."""

import builtins
import io
import json
import re
import sys

import pytest
from command_line import call, refused
from served_models import small
from sizes import needs_kernels

import dofla
from dofla.cli.chat import _HELP
from dofla.runs.view import View
from dofla.serving.chat import Conversation

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


STATS = re.compile(r"(\d+) tokens read; cache (.+), full cache (.+)")


@pytest.fixture(scope="module")
def folder(tiny, tokenizer, tmp_path_factory):
    """The folder of a compressed model."""
    folder = tmp_path_factory.mktemp("chat") / "compressed"
    small(tiny).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def typed(monkeypatch):
    """What a person types, line by line."""

    def lines(*given) -> None:
        waiting = iter(given)

        def answer(prompt: str) -> str:
            line = next(waiting, EOFError)
            if isinstance(line, type):
                raise line
            return line

        monkeypatch.setattr(sys, "stdin", Terminal())
        monkeypatch.setattr(builtins, "input", answer)

    return lines


@pytest.mark.parametrize("plain", [False, True])
def test_lines_of_a_pipe_are_turns(folder, monkeypatch, capsys, plain):
    monkeypatch.setattr(
        sys, "stdin", io.StringIO("Once upon a time\n\nThen\n/stats\n/reset\nOnce upon a time\n/stats\n")
    )
    assert call("chat", "demo" if plain else folder, "--new-tokens", 6) == 0
    out, err = capsys.readouterr()
    first, _, stats, again, last = out.splitlines()
    assert first == again
    assert "no chat template" in err
    assert _HELP in err
    assert err.count("… (cut at --new-tokens 6)\n") == 3
    (tokens, cache, full), (before, *_) = (STATS.fullmatch(line).groups() for line in (last, stats))
    assert int(before) > int(tokens) > 6
    assert (cache == full) == plain


@pytest.mark.parametrize("plain", [False, True])
def test_what_was_said_is_read_once_and_the_answer_is_the_models(folder, tokenizer, plain):
    model = dofla.demo()[0] if plain else dofla.load(folder)
    conversation = Conversation(model, tokenizer, new_tokens=5)
    pieces = []
    first, ending = conversation.answer("Once upon a time", pieces.append)
    assert ("".join(pieces), ending) == (first, "cut")
    conversation.answer("Then", pieces.append)
    assert conversation.writer.read <= len(tokenizer("\nThen")["input_ids"]) + 1
    ids = tokenizer("Once upon a time", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(model.generate(ids, max_new_tokens=5)[0, ids.shape[1] :], skip_special_tokens=True) == first


@pytest.mark.slow
@needs_kernels
def test_answers_from_a_compiled_graph_are_those_without(folder, monkeypatch, capsys):
    said = []
    for options in ([], ["--compile"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon a time\nThen\n/reset\nOnce\n"))
        assert call("chat", folder, "--new-tokens", 4, *options) == 0
        said.append(capsys.readouterr())
    assert said[0].out == said[1].out
    assert "torch.compile makes a graph" in said[1].err
    assert "not converted" in refused(capsys, "chat", "demo", "--compile")


@pytest.mark.parametrize("compressed", [False, True])
def test_turns_go_through_the_chat_template(tiny, tokenizer, folder, compressed, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    model = dofla.load(folder) if compressed else tiny.llama(vocab_size=2048)
    conversation = Conversation(model, tokenizer, new_tokens=4, system="Be brief.")
    answers = [conversation.answer(text, lambda _: None)[0] for text in ("Who?", "Why?")]
    text = f"system: Be brief.\nuser: Who?\nassistant: {answers[0]}\nuser: Why?\nassistant:"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    written = model.generate(ids, max_new_tokens=4, use_cache=True)[0, ids.shape[1] :]
    assert tokenizer.decode(written, skip_special_tokens=True) == answers[1]


def test_a_terminal_is_told_the_commands_and_left_by_exit_or_the_end(folder, typed, capsys):
    typed("Once", KeyboardInterrupt, "/what", "/exit", "never")
    assert call("chat", folder, "--new-tokens", 3) == 0
    out, err = capsys.readouterr()
    assert out.startswith(_HELP)
    assert _HELP in err
    typed("Once")
    assert call("chat", folder, "--new-tokens", 3, "--json") == 0
    found = json.loads(capsys.readouterr().out.strip())
    assert [turn["prompt"] for turn in found["turns"]] == ["Once"]
    assert found["tokens"] > 3
    assert found["cache_bytes"] > 0


def test_an_answer_is_stopped_and_the_conversation_goes_on(folder, typed, monkeypatch, capsys):
    pieces, stream = [], View.stream

    def interrupted(self, text: str) -> None:
        pieces.append(text)
        stream(self, text)
        if len(pieces) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(View, "stream", interrupted)
    typed("Once upon a time", "and then", "/exit")
    assert call("chat", folder, "--new-tokens", 40) == 0
    assert " [stopped]" in capsys.readouterr().out
    assert len(pieces) > 2


@pytest.mark.parametrize("several", [False, True])
def test_an_answer_that_ends_with_its_last_token_is_complete(tiny, tokenizer, several):
    model = tiny.llama(vocab_size=2048)
    answers = Conversation(model, tokenizer, new_tokens=3)
    answers.answer("Once upon a time", lambda _: None)
    end = answers._tokens[-1]
    model.generation_config.eos_token_id = [end, 1] if several else end
    assert Conversation(model, tokenizer, new_tokens=3).answer("Once upon a time", lambda _: None)[1] == "complete"


def test_what_cannot_be_chatted_with_is_refused(tiny, tokenizer, folder, capsys):
    with pytest.raises(dofla.DoflaError, match="not a causal language model"):
        Conversation(tiny.bert(), tokenizer)
    assert "a system message needs a chat template" in refused(capsys, "chat", folder, "--system", "Be brief.")
    assert "no such folder" in refused(capsys, "chat", "no/such/model")


def test_a_prompt_comes_from_a_pipe_or_an_option(folder, monkeypatch, capsys):
    assert call("generate", folder, "--new-tokens", 3, "--prompt", "Once upon\na time", "--json") == 0
    given = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon\na time\n"))
    assert call("generate", folder, "--new-tokens", 3, "--json") == 0
    assert json.loads(capsys.readouterr().out) == given
    monkeypatch.setattr(sys, "stdin", Terminal())
    for words, message in (
        ([], "no text to continue: give --prompt TEXT, pipe a text in, or start dofla chat"),
        (["--prompt", "w1", "--set", "seed=-1"], "seed is -1: give 0 or more"),
    ):
        assert refused(capsys, "generate", folder, *words) == f"dofla: {message}"
