"""Prompts that are continued for people to read."""

from __future__ import annotations

import torch

from dofla.data import TokenWindows
from dofla.evaluation.samples import beginnings


class Letters:
    """A tokenizer whose tokens are bytes, of which 0 separates documents."""

    all_special_ids = (0,)

    def decode(self, ids):
        return bytes(ids).decode()


def windows(text):
    return TokenWindows(torch.tensor([[0 if letter == "|" else ord(letter) for letter in text]]))


def test_prompts_begin_with_a_document_or_a_sentence():
    for text, expected in (
        ("of it.|Once upon a.", "|Once"),
        ("of it. Once upon a.", " Once"),
        ("no ends here at all", "no en"),
    ):
        ((ids, new),) = beginnings(windows(text), Letters(), prompts=3, prompt_tokens=5, new_tokens=7)
        assert ("".join(chr(i) if i else "|" for i in ids.tolist()), new) == (expected, 7)
    ((ids, _),) = beginnings(windows("of it. Once"), None, prompts=1, prompt_tokens=50, new_tokens=7)
    assert len(ids) == 11
