"""Greedy continuations of teacher and student, token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.data import TokenWindows
from dofla.evaluation.generation import check_room, decode
from dofla.integration.prompt_state import read_prompt
from dofla.integration.surgery import softmax
from dofla.report.maps import token_texts


@torch.inference_mode()
def side_by_side(
    student: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    windows: TokenWindows,
    *,
    prompts: int = 3,
    prompt_tokens: int = 48,
    new_tokens: int = 48,
) -> list[dict[str, Any]]:
    """What teacher and student write after the beginnings of a few windows.

    Returns:
        For each prompt ``prompt``, a text; ``teacher`` and ``student``, lists of tokens as text, up to an end of text;
        and ``agree``, the number of tokens before they part.

    Raises:
        DoflaError: the model continues no text, or has too few positions.
    """
    prompt_tokens = min(prompt_tokens, windows.length)
    check_room(student, prompt_tokens + new_tokens)
    ids = windows.input_ids[:, :prompt_tokens]
    if windows.attention_mask is not None:
        ids = ids[windows.attention_mask[:, :prompt_tokens].bool().all(dim=1)]
    ids = ids[:prompts].to(student.device)
    if not len(ids):
        return []
    with softmax(student):
        teacher = _greedy(student, ids, new_tokens)
    ours = _greedy(student, ids, new_tokens)
    end = getattr(tokenizer, "eos_token_id", None)
    rows = []
    for prompt, *both in zip(ids.tolist(), teacher, ours, strict=True):
        a, b = (text[: text.index(end) + 1] if end in text else text for text in both)
        agree = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        texts = {who: token_texts(tokenizer, text) for who, text in (("teacher", a), ("student", b))}
        rows.append({"prompt": "".join(token_texts(tokenizer, prompt)), **texts, "agree": agree})
    return rows


def _greedy(model: PreTrainedModel, ids: Tensor, new_tokens: int) -> list[list[int]]:
    return decode(model, read_prompt(model, ids[:, :-1]), ids[:, -1:], new_tokens).tolist()
