"""Attention sinks: the first real tokens of a sequence, which stay when they leave the local window."""

from __future__ import annotations

import torch
from torch import Tensor

from dofla.attention.constants import LOG_ZERO
from dofla.attention.state import TokenBuffer, known_full


def take_sinks(held: TokenBuffer, leaving: TokenBuffer) -> tuple[TokenBuffer, TokenBuffer, Tensor]:
    """Move the first real tokens that leave the window into the free sink slots.

    Returns:
        The tokens with those masked; the sinks after this call; and the first query that sees each of them as a sink
        [B, s]. Earlier queries see it in the window.
    """
    if not len(held) or known_full(held.log_weight):
        return leaving, held, torch.zeros_like(held.log_weight, dtype=torch.int64)
    rank = sink_slots(leaving, held)
    is_sink = rank < len(held)
    kept = TokenBuffer(leaving.key, leaving.value, leaving.log_weight.masked_fill(is_sink, LOG_ZERO))
    return kept, *_fill(held, leaving, rank, is_sink)


def sink_slots(leaving: TokenBuffer, held: TokenBuffer) -> Tensor:
    """The index of the sink slot that each token leaving the window would fill [B, L]: the number of real tokens before
    it, held sinks included. It is the largest integer for padding."""
    real = leaving.log_weight > LOG_ZERO
    already = (held.log_weight > LOG_ZERO).sum(-1, keepdim=True)
    never = torch.iinfo(torch.int64).max
    return torch.where(real, already + real.cumsum(-1) - 1, never)


def _fill(held: TokenBuffer, leaving: TokenBuffer, rank: Tensor, is_sink: Tensor) -> tuple[TokenBuffer, Tensor]:
    slots = torch.arange(len(held), device=rank.device)
    arrives = is_sink.unsqueeze(-1) & (rank.unsqueeze(-1) == slots)  # [B, L, s]
    taken, source = arrives.any(dim=1), arrives.to(torch.int64).argmax(dim=1)
    free, index = taken[:, None, :, None], source[:, None, :, None]
    sinks = TokenBuffer(
        torch.where(free, leaving.key.take_along_dim(index, dim=2).to(held.key.dtype), held.key),
        torch.where(free, leaving.value.take_along_dim(index, dim=2).to(held.value.dtype), held.value),
        torch.where(taken, leaving.log_weight.gather(1, source), held.log_weight),
    )
    return sinks, torch.where(taken, source, 0)
