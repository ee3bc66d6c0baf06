"""Loss by position in the context: a state of constant size shows its limits late in a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofla.data import TokenWindows, batches, predicted
from dofla.errors import DoflaError
from dofla.integration.surgery import softmax

FIRST_BIN = 16
"""Positions in the first default bin; each later bin ends at twice the position where it begins."""


@torch.inference_mode()
def loss_by_position(
    student: PreTrainedModel,
    windows: TokenWindows,
    *,
    batch_size: int = 1,
    edges: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Next-token loss of teacher and student in bins of the position they predict from.

    A position counts the real tokens before it in its window, from 0; padding on either side counts for nothing.

    Args:
        student: a linearised language model; it is its own teacher.
        windows: held-out text, N windows of L tokens.
        batch_size: windows per forward pass.
        edges: where the bins begin, ascending from 0; the last bin has no end. Default: 0, 16, 32, 64, ...
        progress: called with (done, total) batches.

    Returns:
        ``windows``, ``tokens`` (predicted), and ``bins``: for each bin that holds a token, ``first`` and ``last``
        position, ``tokens``, ``teacher_loss``, ``student_loss`` and ``gap`` in nats per token, each with a standard
        error (``gap_error``, ...) that takes windows as the independent units; None where fewer than two windows
        reach the bin.

    Raises:
        DoflaError: if the windows hold one token each, the edges do not ascend from 0, or a loss is not finite.
    """
    if windows.length < 2:
        raise DoflaError("windows of one token leave nothing to predict: give longer ones")
    edges = _edges(edges, windows.length - 1)
    ends = torch.tensor(edges[1:], dtype=torch.int64)
    sums = []
    parts = batches(windows, batch_size)
    for done, part in enumerate(parts, start=1):
        batch = {name: tensor.to(student.device) for name, tensor in windows.batch(part).items()}
        with softmax(student):
            teacher = token_losses(student, batch)
        losses = torch.stack([torch.ones_like(teacher), teacher, token_losses(student, batch)], dim=-1)
        where = torch.bucketize(_positions(batch), ends.to(student.device), right=True)
        chosen = torch.nn.functional.one_hot(where, len(edges)) * predicted(batch).unsqueeze(-1)
        sums.append(torch.einsum("blk,blf->bkf", chosen.double(), losses.double()).cpu())
        if progress:
            progress(done, len(parts))
    figures = torch.cat(sums)  # [windows, bins, 3]: tokens, teacher, student
    last = [edge - 1 for edge in edges[1:]] + [windows.length - 2]
    bins = [_bin(figures[:, n], edges[n], last[n]) for n in range(len(edges)) if figures[:, n, 0].any()]
    return {"windows": len(windows), "tokens": int(figures[..., 0].sum()), "bins": bins}


def token_losses(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Loss of each next token [B, L - 1] in nats, float32; DoflaError if a logit is not finite."""
    logits = finite(model(**batch, use_cache=False).logits[:, :-1])
    return -torch.log_softmax(logits, dim=-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]


def finite(logits: Tensor) -> Tensor:
    """The logits in float32; DoflaError if one is NaN or infinite."""
    if not torch.isfinite(logits).all():
        raise DoflaError("the model's logits hold NaN or infinity: check the model's dtype and its feature maps")
    return logits.float()


def ratio_error(totals: Tensor, counts: Tensor) -> float | None:
    """Standard error of ``Σ totals / Σ counts`` over independent units [N]; None for fewer than two that count."""
    units = int((counts > 0).sum())
    if units < 2:
        return None
    rest = totals - counts * (totals.sum() / counts.sum())
    return ((rest.square().sum() * units / (units - 1)).sqrt() / counts.sum()).item()


def _edges(edges: Sequence[int] | None, positions: int) -> list[int]:
    if edges is None:
        edges = [0]
        while (start := 2 * edges[-1] or FIRST_BIN) < positions:
            edges.append(start)
    edges = list(edges)
    if edges[:1] != [0] or any(b <= a for a, b in pairwise(edges)):
        raise DoflaError(f"edges: {edges}; give ascending positions, the first of them 0")
    return [edge for edge in edges if edge < positions]


def _positions(batch: dict[str, Tensor]) -> Tensor:
    """Real tokens before each token but the last [B, L - 1]."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    return (mask.cumsum(dim=1) - 1)[:, :-1].clamp(min=0).contiguous()


def _bin(sums: Tensor, first: int, last: int) -> dict[str, Any]:
    tokens, teacher, student = sums.unbind(dim=-1)
    record: dict[str, Any] = {"first": first, "last": last, "tokens": int(tokens.sum())}
    for name, totals in (("teacher_loss", teacher), ("student_loss", student), ("gap", student - teacher)):
        record[name] = (totals.sum() / tokens.sum()).item()
        record[f"{name}_error"] = ratio_error(totals, tokens)
    return record
