"""A toy task: the answer is one of two words, and which one depends on the word asked about."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from dofla.integration.surgery import linearize
from dofla.tasks import Item, Task

WORDS = ["<end>", "<unk>", "Question", "Answer", ":", "left", "right", *(f"w{n}" for n in range(50))]


class Toy(NamedTuple):
    """Models by name (``llama``, ``gpt2``, and their students), a tokenizer for them, a task."""

    model: Callable[[str], PreTrainedModel]
    tokenizer: PreTrainedTokenizerFast
    task: Task


@pytest.fixture(scope="session")
def toy(tiny) -> Toy:
    def model(name: str) -> PreTrainedModel:
        family, _, student = name.partition(" ")
        made = getattr(tiny, family)(initializer_range=0.1)
        return linearize(made, tiny.plan(made, 8)) if student else made

    raw = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", unk_token="<unk>")
    # Questions of several lengths, so that batches are padded.
    items = [Item(f"w{n}" + f" w{n}" * (n % 3), ("left", "right"), n // 3 % 2, id=n) for n in range(24)]
    return Toy(model, tokenizer, Task("toy", "question", items))


@pytest.fixture
def write():
    """A JSONL file of items; returns its path."""

    def write(path, items):
        path.write_text("".join(json.dumps(vars(item)) + "\n" for item in items))
        return path

    return write
