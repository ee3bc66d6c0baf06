from itertools import pairwise

import pytest

from dofla.runs.demo.documents import NAMES, TRADES, recall_documents, recall_prompts


class WordTokenizer:
    """One token per word."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(range(len(text.split())))


def test_documents_are_fixed_by_the_seed():
    assert recall_documents(5, seed=3) == recall_documents(5, seed=3)
    assert recall_documents(5, seed=3) != recall_documents(5, seed=4)


def test_prompts_are_fixed_by_the_seed():
    tokenizer = WordTokenizer()
    assert recall_prompts(5, 100, tokenizer, seed=3) == recall_prompts(5, 100, tokenizer, seed=3)
    assert recall_prompts(5, 100, tokenizer, seed=3) != recall_prompts(5, 100, tokenizer, seed=4)


def test_there_are_many_names_to_guess_from():
    assert len(set(NAMES)) == len(NAMES) >= 30
    assert len(set(TRADES)) == len(TRADES) >= 30


def test_behind_a_trade_always_stands_the_same_name():
    for document in recall_documents(20, seed=1):
        words = [word.strip(".?") for word in document.split()]
        names: dict[str, set[str]] = {}
        for trade, name in pairwise(words):
            if trade in TRADES:
                names.setdefault(trade, set()).add(name)
        assert len(names) >= 4
        assert all(len(told) == 1 and told <= set(NAMES) for told in names.values())


def test_filler_lengthens_documents():
    short, long = (recall_documents(20, seed=0, filler_words=words) for words in ((0, 5), (200, 205)))
    assert min(map(len, long)) > max(map(len, short))


@pytest.mark.parametrize("distance", [60, 150, 300, 400])
def test_the_asked_name_stands_once_at_the_distance(distance: int):
    for prompt, answer in recall_prompts(50, distance, WordTokenizer(), seed=0):
        trade = prompt.split()[-1]
        told = f"{trade} {answer}."
        assert prompt.count(told) == 1
        words_after = len(prompt[prompt.index(told) + len(told) :].split())
        assert words_after >= 3
        assert words_after <= distance + 8
        if distance >= 100:
            assert words_after >= distance - 8
