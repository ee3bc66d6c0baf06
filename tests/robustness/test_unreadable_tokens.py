"""Tokens that a model has no embedding or no position for, and no tokens at all: one line, not PyTorch's own words."""

import pytest
import torch
from command_line import call, refused
from inputs import LENGTH
from transformers import DynamicCache

import dofla
from dofla.integration.reading import check_readable
from dofla.runs.opening import load_tokenizer, open_original

TEXT = ["--length", LENGTH, "--windows", 4, "--set", "samples=16"]


def test_tokens_of_another_tokenizer(made, tmp_path, capsys):
    line = refused(
        capsys, "profile", made / "model", "--data", made / "foreign.safetensors", *TEXT, "--out", tmp_path, "-q"
    )
    assert line == (
        f"dofla: {made / 'foreign.safetensors'} (train): token 64, and LlamaForCausalLM knows 0 to 63: "
        "use its own tokenizer"
    )


def test_windows_longer_than_the_positions_that_were_learned(made, tmp_path, capsys):
    line = refused(capsys, "profile", made / "short", "--data", made / "text.txt", *TEXT, "--out", tmp_path, "-q")
    assert line.endswith(f"{LENGTH} tokens, and GPT2LMHeadModel has {LENGTH - 1} positions: take fewer")


def test_rotary_positions_go_on(tiny):
    model = tiny.llama(max_position_embeddings=8)
    check_readable(model, tiny.tokens(1, 9), "text", new_tokens=9)


@pytest.mark.parametrize("prompt", ["", " ", "\n", "\t\n "])
def test_a_prompt_without_tokens(made, capsys, prompt):
    line = refused(capsys, "generate", made / "adapter", "--prompt", prompt)
    assert line == f"dofla: --prompt {prompt!r} has no tokens: give a text to continue"


def test_a_chat_without_a_template_that_works(made, tmp_path, capsys):
    words = ["generate", made / "adapter", "--prompt", "w1", "--chat"]
    assert refused(capsys, *words) == "dofla: --chat needs a chat template, and the tokenizer has none: leave it out"
    student = dofla.load(made / "adapter")
    student.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(made / "model")
    tokenizer.chat_template = "{{ raise_exception('no such thing') }}"
    tokenizer.save_pretrained(tmp_path)
    said = refused(capsys, "generate", tmp_path, *words[2:])
    assert "does not work (no such thing): mend it, or leave it out" in said


def test_a_prompt_and_an_answer_longer_than_the_positions(made, tmp_path, capsys):
    model = dofla.linear.linearize(open_original(str(made / "short"))[0], budget=8)
    folder = dofla.save_adapter(model, tmp_path / "adapter")
    assert call("generate", folder, "--prompt", "w1 w2", "--new-tokens", LENGTH - 3) == 0
    line = refused(capsys, "generate", folder, "--prompt", "w1 w2", "--new-tokens", LENGTH - 2)
    assert line == (
        f"dofla: --prompt: 2 tokens and {LENGTH - 2} to follow, and GPT2LMHeadModel has {LENGTH - 1} positions: "
        "take fewer"
    )


def test_a_document_and_a_prompt_longer_than_the_positions(made, tmp_path, capsys):
    model = dofla.linear.linearize(open_original(str(made / "short"))[0], budget=8)
    folder, book, state = dofla.save_adapter(model, tmp_path / "adapter"), tmp_path / "book.txt", tmp_path / "state"
    words = ["generate", folder, "--prompt", "w1", "--new-tokens", 1, "--document", book, "--prompt-state", state]
    book.write_text("w1 " * LENGTH)
    line = refused(capsys, *words)
    assert line.startswith(f"dofla: {book}: the prompt: {LENGTH} tokens, and GPT2LMHeadModel has {LENGTH - 1} pos")
    book.write_text("w1 " * (LENGTH - 2))
    line = refused(capsys, *words)
    assert line.startswith(f"dofla: {state} and --prompt: {LENGTH - 1} tokens and 1 to follow, and GPT2LMHeadModel")


@pytest.mark.parametrize(
    ("shape", "chunk", "words"),
    [*((shape, 8, "the prompt: expected tokens") for shape in [(1, 0), (0, 4), (4,)]), ((1, 4), 0, "chunk: 0")],
)
def test_read_prompt_without_tokens_or_in_chunks_of_nothing(made, shape, chunk, words):
    with pytest.raises(dofla.DoflaError, match=words):
        dofla.serving.read_prompt(dofla.load(made / "adapter"), torch.zeros(shape, dtype=torch.int64), chunk=chunk)


def test_an_empty_cache_is_not_saved(made, tmp_path):
    student = dofla.load(made / "adapter")
    with pytest.raises(dofla.DoflaError, match="cache is empty"):
        dofla.serving.save_state(DynamicCache(), torch.ones(1, 4, dtype=torch.int64), tmp_path / "x", student)
