"""Words of a tokenizer, and how it cuts text inside a sentence."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def pieces(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of ``text`` inside a sentence: SentencePiece adds a space to what stands alone."""
    before, after = (tokenizer.encode(x, add_special_tokens=False) for x in ("a", "a" + text))
    return after[len(before) :]


def one_token_words(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Words of four to eight small letters that are one token, and the tokens; in the order of these, in which common
    words come early. Empty if the vocabulary does not mark beginnings of words by a space (byte-level BPE and
    SentencePiece do)."""
    vocabulary = sorted((token, word) for word, token in tokenizer.get_vocab().items())
    return {word[1:]: token for token, word in vocabulary if re.fullmatch("[Ġ▁][a-z]{4,8}", word)}
