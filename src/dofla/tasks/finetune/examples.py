"""From items to batches: the right choice of each item as tokens, of which only the answer's are learnt."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dofla.tasks import STYLES, Task
from dofla.tasks.encode import Row, encode

_CHUNK = 8
"""Batches whose rows are sorted by length together: enough to save most padding, too few to order an epoch."""
IGNORED = -100


def answers(task: Task, tokenizer: PreTrainedTokenizerBase, limit: int) -> list[Row]:
    """The right choice of each item after its context, encoded as it is when scored.

    Args:
        limit: tokens the model reads; longer contexts lose their beginning.

    Raises:
        DoflaError: an answer has no tokens, or more than ``limit``.
    """
    return encode([STYLES[task.style](item)[item.answer] for item in task.items], tokenizer, limit)


def asked_of(rows: Sequence[Row]) -> int:
    """The number of tokens in the rows' answers."""
    return sum(len(row.tokens) - row.context for row in rows)


def batches_of(rows: Sequence[Row], batch_size: int, seed: int) -> list[list[Row]]:
    """One epoch in the order of ``seed``: batches of similar lengths, all of ``batch_size`` but perhaps one."""
    generator = random.Random(seed)
    order = generator.sample(list(rows), len(rows))
    batches = []
    for start in range(0, len(order), batch_size * _CHUNK):
        chunk = sorted(order[start : start + batch_size * _CHUNK], key=lambda row: len(row.tokens))
        batches += [chunk[first : first + batch_size] for first in range(0, len(chunk), batch_size)]
    generator.shuffle(batches)
    return batches


def padded(rows: Sequence[Row]) -> dict[str, Tensor]:
    """``input_ids``, ``attention_mask`` and ``targets``, each [B, L].

    The target of a place is the token after it if that belongs to the answer, else :data:`IGNORED`. Padding is on the
    right, where a causal model does not see it.
    """
    shape = len(rows), max(len(row.tokens) for row in rows) - 1
    ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    targets = torch.full(shape, IGNORED)
    for n, row in enumerate(rows):
        end = len(row.tokens) - 1
        ids[n, :end] = torch.tensor(row.tokens[:-1])
        mask[n, :end] = 1
        targets[n, row.context - 1 : end] = torch.tensor(row.tokens[row.context :])
    return {"input_ids": ids, "attention_mask": mask, "targets": targets}
