import pytest

from dofla.demo.documents import NAMES, RELATIONS, recall_documents, recall_prompts


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


def test_every_relation_leaves_many_values_to_guess_from():
    for relation in RELATIONS:
        assert len(set(relation.values)) == len(relation.values) >= 20
    assert len(set(NAMES)) == len(NAMES)


def test_filler_lengthens_documents():
    short, long = (recall_documents(20, seed=0, filler_words=words) for words in ((0, 5), (200, 205)))
    assert min(map(len, long)) > max(map(len, short))


@pytest.mark.parametrize("distance", [50, 150, 300, 400])
def test_the_asked_fact_stands_once_at_the_distance(distance: int):
    for prompt, answer in recall_prompts(50, distance, WordTokenizer(), seed=0):
        asked = prompt.rsplit("? ", 1)[1]
        fact = f"{asked} {answer}."
        assert prompt.count(fact) == 1
        words_after = len(prompt[prompt.index(fact) + len(fact) :].split())
        assert abs(words_after - distance) <= 8
