"""Loss by position in the context: a state of constant size shows its limits late in a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofla.data import TokenWindows, batches, predicted
from dofla.display import Part, Result, table
from dofla.errors import DoflaError
from dofla.evaluation.sides import counted, of_both
from dofla.integration.recorder import fed

FIRST_BIN = 16
"""Positions in the first default bin; each later bin ends at twice the position where it begins."""


@dataclass(frozen=True)
class PositionBin:
    """Next-token loss of some positions.

    Attributes:
        first, last: position.
        tokens: predicted from there.
        teacher_loss, student_loss, loss_increase: nats per token.
        teacher_loss_error, student_loss_error, loss_increase_error: standard errors that take windows as the
            independent units; None where fewer than two windows reach the bin.
    """

    first: int
    last: int
    tokens: int
    teacher_loss: float
    teacher_loss_error: float | None
    student_loss: float
    student_loss_error: float | None
    loss_increase: float
    loss_increase_error: float | None


@dataclass(frozen=True)
class Positions(Result):
    """Loss by position in the context: how many ``windows``, how many ``tokens`` were predicted, and the ``bins`` that
    hold one."""

    windows: int
    tokens: int
    bins: list[PositionBin]

    def parts(self) -> Iterator[Part]:
        """A row per bin."""
        yield "Loss by position in the context, nats per token"
        shown = table("positions", "tokens", "teacher", "student", "increase")
        for row in self.bins:
            losses = (
                f"{row.teacher_loss:.3f}",
                f"{row.student_loss:.3f}",
                with_error(row.loss_increase, row.loss_increase_error),
            )
            shown.add_row(f"{row.first}-{row.last}", str(row.tokens), *losses)
        yield shown


def with_error(value: float, error: float | None) -> str:
    """A value with its standard error, to three decimals, as tables show it."""
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


@torch.inference_mode()
def loss_by_position(
    student: PreTrainedModel,
    windows: TokenWindows,
    *,
    batch_size: int = 1,
    edges: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Positions:
    """Next-token loss of teacher and student in bins of the position they predict from.

    A position counts the real tokens before it in its window, from 0; padding on either side counts for nothing.

    Args:
        student: a linearized language model; it is its own teacher.
        windows: held-out text, N windows of L tokens.
        batch_size: windows per forward pass.
        edges: where the bins begin, ascending from 0; the last bin has no end. Default: 0, 16, 32, 64, ...
        progress: called with (done, total) batches.

    Raises:
        DoflaError: if the windows hold one token each, the edges do not ascend from 0, or a loss is not finite.
    """
    if windows.length < 2:
        raise DoflaError("windows of one token leave nothing to predict: give longer ones")
    edges = _edges(edges, windows.length - 1)
    ends = torch.tensor(edges[1:], dtype=torch.int64)
    sums = []
    for part in counted(batches(windows, batch_size), progress):
        batch = {name: tensor.to(student.device) for name, tensor in windows.batch(part).items()}
        teacher, ours = of_both(student, token_losses, batch)
        losses = torch.stack([torch.ones_like(teacher), teacher, ours], dim=-1)
        where = torch.bucketize(_positions(batch), ends.to(student.device), right=True)
        chosen = torch.nn.functional.one_hot(where, len(edges)) * predicted(batch).unsqueeze(-1)
        sums.append(torch.einsum("blk,blf->bkf", chosen.double(), losses.double()).cpu())
    figures = torch.cat(sums)  # [windows, bins, 3]: tokens, teacher, student
    last = [edge - 1 for edge in edges[1:]] + [windows.length - 2]
    bins = [_bin(figures[:, n], edges[n], last[n]) for n in range(len(edges)) if figures[:, n, 0].any()]
    return Positions(len(windows), int(figures[..., 0].sum()), bins)


def token_losses(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Loss of each next token [B, L - 1] in nats, float32; DoflaError if a logit is not finite."""
    logits = finite(model(**fed(model, batch), use_cache=False).logits[:, :-1])
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


def _bin(sums: Tensor, first: int, last: int) -> PositionBin:
    tokens, teacher, student = sums.unbind(dim=-1)
    theirs, ours, increase = (
        ((totals.sum() / tokens.sum()).item(), ratio_error(totals, tokens))
        for totals in (teacher, student, student - teacher)
    )
    return PositionBin(first, last, int(tokens.sum()), *theirs, *ours, *increase)
