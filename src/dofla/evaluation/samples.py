"""Continuations of teacher and student side by side."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.data import TokenWindows
from dofla.integration.surgery import softmax


def continuations(
    student: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    windows: TokenWindows,
    *,
    prompts: int,
    prompt_tokens: int,
    new_tokens: int,
) -> list[dict[str, Any]]:
    """Greedy continuations, of ``new_tokens`` tokens, of the beginnings of a few windows: ``prompt``, ``teacher``,
    ``student`` and ``agree``, the number of tokens until they first differ."""
    beginnings = windows.input_ids[:prompts, :prompt_tokens].to(student.device)
    options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id or 0}
    options["attention_mask"] = torch.ones_like(beginnings)
    with softmax(student):
        teacher = student.generate(beginnings, **options)[:, beginnings.shape[1] :]
    ours = student.generate(beginnings, **options)[:, beginnings.shape[1] :]
    rows = []
    for prompt, a, b in zip(beginnings, teacher, ours, strict=True):
        shared = min(len(a), len(b))
        differ = (a[:shared] != b[:shared]).nonzero()
        texts = [tokenizer.decode(t, skip_special_tokens=True) for t in (prompt, a, b)]
        agree = int(differ[0]) if len(differ) else shared
        rows.append(dict(zip(("prompt", "teacher", "student"), texts, strict=True)) | {"agree": agree})
    return rows
