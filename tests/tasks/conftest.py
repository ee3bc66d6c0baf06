"""A tokenizer of whole words for the tiny models, and a task for it."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dofla.tasks import Item, Task

WORDS = [f"w{n}" for n in range(50)]
_FURTHER = ["Question", "Answer", ":", ".", "_", "Passage", "Choices", "A", "B", "C", "D"]


@pytest.fixture(scope="session")
def words() -> PreTrainedTokenizerFast:
    vocabulary = {word: n for n, word in enumerate(["<end>", "<unk>", *_FURTHER, *WORDS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<end>", eos_token="<end>", unk_token="<unk>")


@pytest.fixture(scope="session")
def make_task():
    """Items of random words in any style, with one to five words a choice."""

    def make(style: str = "question", count: int = 6, choices: int = 3, longest: int = 12, seed: int = 0) -> Task:
        rng = random.Random(seed)

        def text(most: int) -> str:
            return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))

        items = []
        for number in range(count):
            question = f"{text(longest)} _ {text(4)}" if style == "blank" else text(longest)
            options = tuple(text(5) for _ in range(choices))
            context = text(longest) if style == "passage" else None
            items.append(Item(question, options, rng.randrange(choices), id=number, context=context))
        return Task(f"made_{style}", style, items)

    return make
