"""Greedy continuations of teacher and student, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.errors import DoflaError
from dofla.evaluation.samples import Prompt
from dofla.evaluation.sides import of_both
from dofla.integration.positions import positions_of
from dofla.report.maps import token_texts


@torch.inference_mode()
def side_by_side(
    student: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, prompts: Sequence[Prompt]
) -> list[dict[str, Any]]:
    """Greedy continuations of each prompt by teacher and student.

    Returns:
        For each prompt ``prompt``, a text; ``teacher`` and ``student``, lists of tokens as text, up to an end of text;
        and ``agree``, the number of tokens before they part.

    Raises:
        DoflaError: the model has too few positions.
    """
    end, special = getattr(tokenizer, "eos_token_id", None), getattr(tokenizer, "all_special_ids", [])
    rows = []
    for ids, new_tokens in prompts:
        if (most := positions_of(student)) is not None and len(ids) + new_tokens > most:
            raise DoflaError(f"{len(ids) + new_tokens} tokens, and the model has {most} positions: ask for fewer")
        prompt = ids[None].to(student.device)
        both = of_both(student, _greedy, prompt, new_tokens, getattr(tokenizer, "pad_token_id", None) or 0)
        a, b = (text[: text.index(end)] if end in text else text for text in both)
        agree = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        texts = {who: token_texts(tokenizer, text) for who, text in (("teacher", a), ("student", b))}
        known = [number for number in ids.tolist() if number not in special]
        rows.append({"prompt": "".join(token_texts(tokenizer, known)), **texts, "agree": agree})
    return rows


def _greedy(model: PreTrainedModel, ids: Tensor, new_tokens: int, padding: int) -> list[int]:
    options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": padding}
    written = model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator] # of their GenerationMixin
    return written[0, ids.shape[1] :].tolist()
