"""Losses of one layer: its attention, or what comes of it, against the teacher's (arXiv 2507.03340, section 4).

Teacher and student see the same call of the layer: the teacher's queries and keys.

Of a batch that several processes share, each has the calls of its own windows. What a loss divides by, or takes the
logarithm of, it sums over all of them first: so its value is that of the whole batch, and the gradients of all
processes add up to its gradient.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dofla.attention import LOG_ZERO, accumulable, exact_scores
from dofla.distillation.distributed import gather
from dofla.distillation.scores import log_scores
from dofla.integration.recorder import AttentionCall
from dofla.layers import AttentionLayer

LayerLoss = Callable[[AttentionCall, AttentionLayer, Tensor], Tensor]
"""(the teacher's call, the student's layer, query rows [R]) → scalar."""


def student_log_scores(call: AttentionCall, layer: AttentionLayer, rows: Tensor) -> Tensor:
    """Log of the student's unnormalized attention [B, H, R, L], LOG_ZERO where a key is not visible."""
    scores = log_scores(layer, call.query[:, :, rows], call, rows)
    return scores.masked_fill(call.hidden(rows), LOG_ZERO)


def attention_kl(call: AttentionCall, layer: AttentionLayer, rows: Tensor) -> Tensor:
    """KL(teacher ‖ student) of the attention of each row [B, H, R], nats."""
    return divergence(call.log_weights(rows), torch.log_softmax(student_log_scores(call, layer, rows), dim=-1))


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(teacher ‖ student) of log-probabilities [..., L]: [...], nats."""
    return (teacher.exp() * (teacher - student)).sum(dim=-1)


def softmax_loss(call: AttentionCall, layer: AttentionLayer, rows: Tensor) -> Tensor:
    """Mean KL over heads and rows: the paper's cross-entropy less the teacher's entropy, so 0 is perfect."""
    return _mean_of_rows(attention_kl(call, layer, rows), call, rows)


def _mean_of_rows(values: Tensor, call: AttentionCall, rows: Tensor) -> Tensor:
    """Mean over heads and real rows of ``values`` [B, H, R].

    The divisor counts the real rows that a random draw of as many rows is expected to hold, and not those that this
    one holds (perhaps none): only so is the loss of a draw an unbiased estimate of the loss of all rows.
    """
    batch, heads, length, _ = call.query.shape
    real = batch * length if call.weight is None else call.weight.bool().sum()
    total = (values * call.real_rows(rows).unsqueeze(1)).sum()
    expected = torch.as_tensor(real * heads * len(rows) / length, dtype=total.dtype, device=total.device)
    total, expected = gather(torch.stack([total, expected])).sum(0)
    return total / expected


def output_loss(call: AttentionCall, layer: AttentionLayer, rows: Tensor) -> Tensor:
    """Mean KL, and the squared error of the attention output relative to the teacher's own square, mean of heads.

    The values tell which errors of attention matter; alone they leave rows undetermined whose values are alike.
    """
    exact, approximate = call.log_weights(rows), torch.log_softmax(student_log_scores(call, layer, rows), dim=-1)
    value = accumulable(call.value).repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)
    real = call.real_rows(rows)[:, None, :, None]
    wanted, found = exact.exp() @ value * real, approximate.exp() @ value * real
    over = (0, 2, 3)
    error, square = gather(torch.stack([(found - wanted).square().sum(over), wanted.square().sum(over)])).sum(0)
    relative = error / square.clamp_min(torch.finfo(square.dtype).tiny)
    return _mean_of_rows(divergence(exact, approximate), call, rows) + relative.mean()


def log_kernel_errors(call: AttentionCall, approximate: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Log of Σ (K − K̂)² and of Σ K², over the visible pairs of the whole batch, per query head [H]; ``approximate`` are
    the :func:`student_log_scores`."""
    hidden = call.hidden(rows) | ~call.real_rows(rows)[:, None, :, None]
    exact = exact_scores(call.query[:, :, rows], call.key, call.scaling).masked_fill(hidden, LOG_ZERO)
    approximate = approximate.masked_fill(hidden, LOG_ZERO)
    over = (0, 2, 3)
    level = torch.maximum(exact.amax(over), approximate.amax(over)).detach()
    levels = level[None, :, None, None]
    error = (torch.exp(exact - levels) - torch.exp(approximate - levels)).square().sum(over)
    error = error.clamp_min(torch.finfo(error.dtype).tiny).log()  # a perfect student has an error of exactly 0
    return error + 2 * level, torch.logsumexp(2 * exact.transpose(0, 1).flatten(1), dim=-1)


def l2_loss(call: AttentionCall, layer: AttentionLayer, rows: Tensor) -> Tensor:
    """Squared error of the kernel over the visible pairs, relative to the kernel's own square, as a log, mean of heads.

    The paper's plain squared error overflows on real heads, where K passes exp(100). Per head, the logarithm of the
    relative error has the same minimum on a batch and a gradient of the same direction, to whose length Adam is blind.
    """
    errors = log_kernel_errors(call, student_log_scores(call, layer, rows), rows)
    error, square = gather(torch.stack(errors)).logsumexp(0)
    return (error - square).mean()


LOSSES: dict[str, LayerLoss] = {"softmax": softmax_loss, "l2": l2_loss, "output": output_loss}
