"""A tokenizer of whole words with those of the prompts of tasks, and a task for it."""

import random

import pytest
from transformers import PreTrainedTokenizerFast
from word_tokenizers import word_tokenizer

from dofla.tasks import Item, Task

WORDS = [f"w{n}" for n in range(50)]
_FURTHER = ["Question", "Answer", ":", ".", "_", "Passage", "Choices", "A", "B", "C", "D"]


@pytest.fixture(scope="session")
def words() -> PreTrainedTokenizerFast:
    return word_tokenizer(["<end>", "<unk>", *_FURTHER, *WORDS], bos_token="<end>", eos_token="<end>")


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
