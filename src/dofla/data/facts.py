"""Facts told among text, and asked for at its end: what a memory must look up again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dofla.data.windows import TokenWindows
from dofla.errors import DoflaError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FACT = " The number of the {word} is {number}."
_DIGITS = 5
Span = tuple[int, int]
PER_FACT = 128
"""Tokens of a document for each fact in it; of these, telling it twice takes about thirty."""


@dataclass(frozen=True)
class Facts:
    """Documents of text with facts at places that were drawn. The last ``asked`` tokens of each tell all facts once
    more, in another order."""

    documents: TokenWindows
    # [documents, asked, 2], where the fact of each of these tokens was told: its first token, and the next after it
    told: Tensor

    @property
    def asked(self) -> int:
        """Tokens at the end of each document that tell the facts once more."""
        return self.told.shape[1]

    @classmethod
    def among(
        cls, text: TokenWindows, tokenizer: PreTrainedTokenizerBase, length: int, count: int = 1, seed: int = 0
    ) -> Facts:
        """Facts among windows of text, which stand one after the other in an order that is drawn for each of ``count``
        documents of ``length`` tokens, or fewer where the text is shorter. DoflaError for padding, a vocabulary with
        too few words, and no room for a fact."""
        if text.attention_mask is not None:
            raise DoflaError("facts are told among whole windows: give text without padding")
        words, facts = list(one_token_words(tokenizer)), min(length, text.tokens) // PER_FACT
        if facts < 1:
            raise DoflaError(f"no room for a fact among {min(length, text.tokens)} tokens: {PER_FACT} are needed")
        if len(words) < facts:
            raise DoflaError(f"the tokenizer has {len(words)} words of one token, fewer than {facts} facts: all differ")
        rng, documents = Random(seed), []
        for _ in range(count):
            own = [
                pieces(tokenizer, FACT.format(word=word, number=rng.randrange(10 ** (_DIGITS - 1), 10**_DIGITS)))
                for word in rng.sample(words, facts)
            ]
            order = torch.tensor(rng.sample(range(len(text)), len(text)))
            documents.append(_with_facts(text.input_ids[order].flatten().tolist(), own, length, rng))
        length, asked = (min(map(len, each)) for each in zip(*documents, strict=True))
        ids = torch.tensor([ids[len(ids) - length :] for ids, _ in documents])
        told = [torch.tensor(places[len(places) - asked :]) - (len(ids) - length) for ids, places in documents]
        return cls(TokenWindows(ids, source=f"facts among {text.source}"), torch.stack(told).clamp_min(0))


def _with_facts(text: list[int], facts: list[list[int]], length: int, rng: Random) -> tuple[list[int], list[Span]]:
    """At most ``length`` tokens, of a text with facts in it and again at its end; and for each token of the latter,
    where its fact stands in the text."""
    again = rng.sample(range(len(facts)), len(facts))
    text = text[: length - 2 * sum(map(len, facts))]
    places = sorted(rng.randrange(len(text) + 1) for _ in facts)
    for place, fact in reversed(list(zip(places, facts, strict=True))):
        text[place:place] = fact
    firsts = [place + sum(map(len, facts[:n])) for n, place in enumerate(places)]
    told = [(firsts[n], firsts[n] + len(facts[n])) for n in again for _ in facts[n]]
    return text + [token for n in again for token in facts[n]], told


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
