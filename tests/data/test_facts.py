"""Facts told among text and asked for at its end."""

import re

import pytest
import torch

import dofla
from dofla.data.facts import Facts, one_token_words
from dofla.errors import DoflaError

SAID = re.compile(r" The number of the ([a-z]+) is ([0-9]{5})\.")


def text(tokenizer, count=6, length=64):
    """Windows of which each repeats a token of its own, which is in no fact: the middle or the end of a word."""
    parts = [token for word, token in sorted(tokenizer.get_vocab().items()) if re.fullmatch("[a-z]{3,}", word)]
    return dofla.TokenWindows(torch.tensor(parts[:count])[:, None].expand(-1, length).clone())


@pytest.mark.parametrize("length", [256, pytest.param(300, marks=pytest.mark.slow)])
def test_each_fact_is_told_among_the_text_and_again_at_the_end(tokenizer, length):
    found, again = (Facts.among(text(tokenizer), tokenizer, length, count=3, seed=4) for _ in range(2))
    assert found.documents.input_ids.shape == (3, length)
    assert torch.equal(found.documents.input_ids, again.documents.input_ids)
    words, kept = one_token_words(tokenizer), set(text(tokenizer).input_ids.flatten().tolist())
    everything = []
    for ids in found.documents.input_ids.tolist():
        told, asked = (SAID.findall(tokenizer.decode(x)) for x in (ids[: -found.asked], ids[-found.asked :]))
        assert len(told) == length // 128 == len(dict(told))
        assert sorted(told) == sorted(asked)
        assert set(dict(told)) <= set(words)
        everything.append(told)
        for start, end in found.told[len(everything) - 1].tolist():
            assert SAID.fullmatch(tokenizer.decode(ids[start:end]))
        # What is left is the text, window after window in some order, its end left out.
        kinds = [token for token in ids if token in kept]
        runs = [token for n, token in enumerate(kinds) if n == 0 or kinds[n - 1] != token]
        assert len(runs) == len(set(runs))
    assert len({str(told) for told in everything}) == 3
    assert not torch.equal(
        Facts.among(text(tokenizer), tokenizer, length).documents.input_ids, found.documents.input_ids[:1]
    )


def test_a_document_is_no_longer_than_the_text_and_what_it_is_told(tokenizer):
    found = Facts.among(text(tokenizer, 2, 100), tokenizer, 4096)
    assert 200 <= found.documents.length <= 200 + 2 * found.asked
    assert found.documents.source == "facts among tensor"


def test_words_are_whole_and_stand_for_one_token(tokenizer):
    words = one_token_words(tokenizer)
    assert len(words) > 50
    assert all(tokenizer.decode([token]) == f" {word}" for word, token in words.items())
    assert list(words.values()) == sorted(words.values())


def test_refusals(tiny, tokenizer):
    with pytest.raises(DoflaError, match="no room for a fact among 100 tokens: 128 are needed"):
        Facts.among(text(tokenizer), tokenizer, 100)
    with pytest.raises(DoflaError, match="give text without padding"):
        Facts.among(dofla.TokenWindows.of(tiny.padded(2, 200)), tokenizer, 200)

    class Letters:
        def get_vocab(self):
            return {"a": 0, "b": 1}

    with pytest.raises(DoflaError, match="the tokenizer has 0 words of one token, fewer than 2 facts"):
        Facts.among(text(tokenizer), Letters(), 256)
