"""Continuations of original and converted model side by side."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.data import TokenWindows
from dofla.data.packing import separator_id
from dofla.evaluation.sides import of_both
from dofla.integration.offload import device_of


class Prompt(NamedTuple):
    """The tokens [T] of a text to continue, and how many new ones to write at most."""

    ids: Tensor
    new_tokens: int


def prompts_of(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, new_tokens: int) -> list[Prompt]:
    """Prompts of these texts, each the beginning of a document."""
    separator = separator_id(tokenizer)
    start = [] if separator is None else [separator]
    rows = (start + tokenizer.encode(text, add_special_tokens=False) for text in texts)
    return [Prompt(torch.tensor(row), new_tokens) for row in rows]


def beginnings(
    windows: TokenWindows, tokenizer: PreTrainedTokenizerBase, *, prompts: int, prompt_tokens: int, new_tokens: int
) -> list[Prompt]:
    """At most ``prompts`` prompts of ``prompt_tokens`` (fewer in shorter windows), one from each of the first windows:
    the beginning of a document, or of a sentence, if there is one. Padded windows that are too short are
    passed over."""
    size, rows = min(prompt_tokens, windows.length), windows.input_ids
    if windows.attention_mask is not None:
        rows = rows[windows.attention_mask[:, :size].bool().all(dim=1)]
    starts = [_start(row.tolist(), tokenizer, size) for row in rows[:prompts]]
    return [Prompt(row[start : start + size], new_tokens) for row, start in zip(rows, starts, strict=False)]


def _start(ids: list[int], tokenizer: PreTrainedTokenizerBase, size: int) -> int:
    """Where a prompt of so many tokens begins best; 0 if nowhere else."""
    special, places = set(tokenizer.all_special_ids), range(len(ids) - size + 1)
    whole = [n for n in places if not special.intersection(ids[n + 1 : n + size])]
    documents = (n for n in whole if ids[n] in special)
    sentences = (n for n in whole if n and str(tokenizer.decode([ids[n - 1]])).rstrip().endswith((".", "!", "?")))
    return next(documents, next(sentences, 0))


def continuations(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]
) -> list[dict[str, Any]]:
    """Greedy continuations of each prompt: ``prompt``, ``original`` and ``model``."""
    rows = []
    for ids, new_tokens in prompts:
        both = of_both(model, _continuation, ids, new_tokens, tokenizer.pad_token_id or 0)
        texts = [tokenizer.decode(t, skip_special_tokens=True) for t in (ids, *both)]
        rows.append(dict(zip(("prompt", "original", "model"), texts, strict=True)))
    return rows


def _continuation(model: PreTrainedModel, ids: Tensor, new_tokens: int, padding: int) -> Tensor:
    """The likeliest tokens after ``ids`` [T], one by one."""
    beginning = ids[None].to(device_of(model))
    options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": padding}
    whole = model.generate(  # type: ignore[operator] # of their GenerationMixin
        beginning, attention_mask=torch.ones_like(beginning), **options
    )
    return whole[0, len(ids) :]
