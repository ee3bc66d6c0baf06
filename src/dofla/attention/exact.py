"""The exact part of a hybrid layer: softmax scores for the keys close by and for the attention sinks, the first real
tokens of a sequence, which stay when they leave the local window."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dofla.attention.constants import LOG_ZERO
from dofla.attention.state import TokenBuffer, accumulable, known_full

_BLOCK = 64


@dataclass(frozen=True)
class ExactPart:
    """Queries of a causal hybrid layer, and the tokens that they attend to exactly: window and attention sinks."""

    query: Tensor  # [B, H, L, d]
    near: TokenBuffer  # L + window - 1 tokens; query i sees near[i : i + window]
    window: int  # number of last keys that a query sees, its own included
    sinks: TokenBuffer  # s tokens
    visible_from: Tensor  # [B, s], the first query that sees a sink
    scaling: float  # scores are scaling · q·k

    def widened(self) -> ExactPart:
        """The same in a precision fit for the arithmetic."""
        near, sinks = (
            TokenBuffer(accumulable(t.key), accumulable(t.value), t.log_weight) for t in (self.near, self.sinks)
        )
        return replace(self, query=accumulable(self.query), near=near, sinks=sinks)

    def attend(self) -> tuple[Tensor, Tensor]:
        """Output [B, H, L, dv] and log-normalizer [B, H, L]."""
        rows = torch.arange(self.query.shape[-2], device=self.query.device)
        hidden = rows[None, :, None] < self.visible_from.unsqueeze(1)
        return exact_attention(self.query, self.near, self.window - 1, 0, self.sinks, hidden, self.scaling)


def exact_attention(
    query: Tensor,
    near: TokenBuffer,
    before: int,
    after: int,
    sinks: TokenBuffer | None,
    sink_hidden: Tensor | None,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each query [B, H, L, d] to a band of keys around it and to the sinks, under one normalizer.

    Of the L + before + after tokens that are ``near``, query i sees ``near[i : i + before + after + 1]``; and of the
    sinks those that are not hidden from it [B, L, s]. Returns output [B, H, L, dv] and log-normalizer [B, H, L]; zero
    and LOG_ZERO for a row that sees nothing.
    """
    batch, heads, length, head_dim = query.shape
    kv_heads = near.key.shape[1]
    groups = heads // kv_heads
    block = min(max(before + after + 1, _BLOCK), length)
    blocks = -(-length // block)
    spare = blocks * block - length
    span = block + before + after

    q = F.pad(accumulable(query) * scaling, (0, 0, 0, spare)).view(batch, kv_heads, groups, blocks, block, head_dim)
    q = q.transpose(2, 3).reshape(batch, kv_heads, blocks, groups * block, head_dim)
    k = F.pad(accumulable(near.key), (0, 0, 0, spare)).unfold(2, span, block)  # [B, Hkv, blocks, d, span]
    v = F.pad(accumulable(near.value), (0, 0, 0, spare)).unfold(2, span, block).mT
    log_weight = F.pad(near.log_weight, (0, spare), value=LOG_ZERO).unfold(1, span, block)  # [B, blocks, span]

    row, column = torch.arange(block, device=q.device)[:, None], torch.arange(span, device=q.device)[None, :]
    outside = (column < row) | (column > row + before + after)
    logits = (q @ k).view(batch, kv_heads, blocks, groups, block, span)
    logits = (logits + log_weight[:, None, :, None, None, :]).masked_fill(outside, LOG_ZERO)
    if sinks and sink_hidden is not None:  # not of length 0 either, which older versions of torch do not pad
        hidden = F.pad(sink_hidden, (0, 0, 0, spare), value=True).view(batch, 1, blocks, 1, block, len(sinks))
        to_sinks = (q @ accumulable(sinks.key).mT.unsqueeze(2)).view(batch, kv_heads, blocks, groups, block, len(sinks))
        to_sinks = (to_sinks + sinks.log_weight[:, None, None, None, None, :]).masked_fill(hidden, LOG_ZERO)
        logits = torch.cat([logits, to_sinks], dim=-1)

    normalizer = torch.logsumexp(logits, dim=-1)
    weights = torch.softmax(logits, dim=-1).flatten(3, 4)  # [B, Hkv, blocks, groups·block, span + s]
    out = weights[..., :span] @ v
    if sinks:
        out = out + weights[..., span:] @ accumulable(sinks.value).unsqueeze(2)
    out = out.view(batch, kv_heads, blocks, groups, block, -1).transpose(2, 3).reshape(batch, heads, blocks * block, -1)
    normalizer = normalizer.transpose(2, 3).reshape(batch, heads, blocks * block)
    seen = normalizer[..., :length] > LOG_ZERO / 2
    return out[:, :, :length] * seen.unsqueeze(-1), normalizer[..., :length]


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two attentions over disjoint sets of keys, each an output and a log-normalizer, made one."""
    share = torch.sigmoid(first[1] - second[1]).unsqueeze(-1)
    return share * first[0] + (1 - share) * second[0], torch.logaddexp(first[1], second[1])


def take_sinks(held: TokenBuffer, leaving: TokenBuffer) -> tuple[TokenBuffer, TokenBuffer, Tensor]:
    """Move the first real tokens that leave the window into the free sink slots. Returns the tokens with those masked,
    the sinks after, and the first query that sees each of them as a sink [B, s]; earlier ones see it in the window."""
    if not len(held) or known_full(held.log_weight):
        return leaving, held, torch.zeros_like(held.log_weight, dtype=torch.int64)
    rank = sink_slots(leaving, held)
    is_sink = rank < len(held)
    kept = TokenBuffer(leaving.key, leaving.value, leaving.log_weight.masked_fill(is_sink, LOG_ZERO))
    slots = torch.arange(len(held), device=rank.device)
    arrives = is_sink.unsqueeze(-1) & (rank.unsqueeze(-1) == slots)  # [B, L, s]
    taken, source = arrives.any(dim=1), arrives.to(torch.int64).argmax(dim=1)
    free, index = taken[:, None, :, None], source[:, None, :, None]
    sinks = TokenBuffer(
        torch.where(free, leaving.key.take_along_dim(index, dim=2).to(held.key.dtype), held.key),
        torch.where(free, leaving.value.take_along_dim(index, dim=2).to(held.value.dtype), held.value),
        torch.where(taken, leaving.log_weight.gather(1, source), held.log_weight),
    )
    return kept, sinks, torch.where(taken, source, 0)


def sink_slots(leaving: TokenBuffer, held: TokenBuffer) -> Tensor:
    """The index of the sink slot that each token leaving the window would fill [B, L]: the number of real tokens before
    it, held sinks included. It is the largest integer for padding."""
    real = leaving.log_weight > LOG_ZERO
    already = (held.log_weight > LOG_ZERO).sum(-1, keepdim=True)
    never = torch.iinfo(torch.int64).max
    return torch.where(real, already + real.cumsum(-1) - 1, never)
