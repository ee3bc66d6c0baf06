"""Continuations of teacher and student side by side."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.data import TokenWindows
from dofla.integration.surgery import softmax
from dofla.recipe import EvaluateSpec


def continuations(
    student: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, windows: TokenWindows, spec: EvaluateSpec
) -> list[dict[str, Any]]:
    """Greedy continuations of the beginnings of a few windows: ``prompt``, ``teacher``, ``student`` and ``agree``, the
    number of tokens until they first differ."""
    prompts = windows.input_ids[: spec.prompts, : spec.prompt_tokens].to(student.device)
    options = {"max_new_tokens": spec.new_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id or 0}
    options["attention_mask"] = torch.ones_like(prompts)
    with softmax(student):
        teacher = student.generate(prompts, **options)[:, prompts.shape[1] :]
    ours = student.generate(prompts, **options)[:, prompts.shape[1] :]
    rows = []
    for prompt, a, b in zip(prompts, teacher, ours, strict=True):
        shared = min(len(a), len(b))
        differ = (a[:shared] != b[:shared]).nonzero()
        texts = [tokenizer.decode(t, skip_special_tokens=True) for t in (prompt, a, b)]
        agree = int(differ[0]) if len(differ) else shared
        rows.append(dict(zip(("prompt", "teacher", "student"), texts, strict=True)) | {"agree": agree})
    return rows
