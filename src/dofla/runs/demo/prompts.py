"""Prompts that the bundled model continues in the demo: a story, and a question on a name stated long before."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

from dofla.data.packing import separator_id
from dofla.evaluation.samples import Prompt
from dofla.runs.demo.documents import recall_prompts

STORY = (
    "Once upon a time, there was a little girl named Lily. She had a big red ball and she loved to play with it in the "
    "park. One day,"
)
DISTANCE = 350
"""Tokens between a name and the question."""


def demo_prompts(tokenizer: PreTrainedTokenizerBase, new_tokens: int) -> list[Prompt]:
    """The beginning of a story, to be continued by ``new_tokens`` tokens, and a document of some 360 tokens that ends
    with a question, of which the answer is written."""
    ((document, answer),) = recall_prompts(1, DISTANCE, tokenizer, seed=1)
    size = len(tokenizer.encode(f" {answer}.", add_special_tokens=False))
    return [_prompt(tokenizer, STORY, new_tokens), _prompt(tokenizer, document, size)]


def _prompt(tokenizer: PreTrainedTokenizerBase, text: str, new_tokens: int) -> Prompt:
    separator = separator_id(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return Prompt(torch.tensor(ids if separator is None else [separator, *ids]), new_tokens)
