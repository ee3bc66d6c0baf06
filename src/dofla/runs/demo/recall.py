"""The demo's recall texts as a source of recall prompts."""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

from dofla.data.words import pieces
from dofla.evaluation.recall import Question, RecallPrompt
from dofla.runs.demo.documents import NAMES, recall_prompts


class Villagers:
    """The recall texts of the demo: villagers are introduced by trade and name, then one trade is asked for.

    One question per prompt; ``length`` is the number of tokens since the answer was told.
    """

    name = "villagers"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def prompts(self, length: int, count: int, seed: int) -> list[RecallPrompt]:
        return [self._prompt(*told) for told in recall_prompts(count, length, self.tokenizer, seed)]

    def _prompt(self, text: str, name: str) -> RecallPrompt:
        told = [word for word in re.findall(r"\w+", text) if word in NAMES]
        ids = self.tokenizer.encode(text)
        first = [pieces(self.tokenizer, f" {word}")[0] for word in told]
        depth = told.index(name) / (len(told) - 1)
        return RecallPrompt(ids, [Question(len(ids) - 1, first[told.index(name)], tuple(first), depth)])
