"""Exact attention in plain torch, and how important it makes each token."""

import torch
from torch import Tensor

from dofla.attention.constants import LOG_ZERO
from dofla.attention.state import accumulable


def attention_and_importance(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    first: int,
    *,
    skipped: int = 0,
    near: int = 0,
    real: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last of some tokens, and the sums of the squared weights that the first ones got.

    Args:
        query: [B, H, L, d].
        key: [B, Hkv, P, d].
        value: [B, Hkv, P, dv].
        scaling: of the scores.
        first: tokens whose importance is asked for.
        skipped: queries that do not count, the first of all.
        near: queries that do not count for a token: its own, and those right after it.
        real: [B, Hkv or 1, P], False for padding, which counts for nothing; by default there is none.

    Returns:
        Output [B, H, L, dv], and the importance of the first tokens [B, Hkv, n], float32 at least.
    """
    (batch, heads, tokens), (length, groups) = key.shape[:3], (query.shape[2], query.shape[1] // key.shape[1])
    before, keys, place = tokens - length, accumulable(key).mT, torch.arange(tokens, device=key.device)
    asked = (accumulable(query) * scaling).unflatten(1, (heads, groups))
    counts = (place[before:] >= before + skipped).float().expand(batch, 1, 1, length)
    if real is not None:
        counts, hidden = counts * real[:, :1, None, before:], ~real.unsqueeze(2)
    out, total = value.new_empty(*query.shape[:3], value.shape[-1]), keys.new_zeros(batch, heads, first)
    at_once = 2**20 if key.device.type == "cpu" else 2**26  # on a CPU what stays in its cache
    rows = min(length, max(1, at_once // (batch * query.shape[1] * tokens)))
    for start in range(0, length, rows):
        end = min(start + rows, length)
        begins, ends = before + start, before + end  # of the queries' own tokens
        weights = asked[:, :, :, start:end].flatten(2, 3) @ keys[..., :ends]  # [B, Hkv, G R, <= P]
        of_query, asks = weights.unflatten(2, (groups, -1)), place[begins:ends, None]
        of_query[..., begins:].masked_fill_(place[begins:ends] > asks, LOG_ZERO)
        if real is not None:
            weights.masked_fill_(hidden[..., :ends], LOG_ZERO)
        weights.sub_(weights.amax(-1, keepdim=True)).exp_()
        weights.div_(weights.sum(-1, keepdim=True))
        piece = weights.to(value.dtype) @ value[:, :, :ends]
        out[:, :, start:end] = piece.unflatten(2, (groups, -1)).flatten(1, 2)
        if near:
            recent = slice(max(begins - near, 0), ends)
            of_query[..., recent].masked_fill_(place[recent] > asks - near, 0)
        seen, asked_by = min(first, ends), counts[..., start:end].expand(-1, heads, groups, -1).flatten(2)
        total[..., :seen] += (asked_by.unsqueeze(2).to(weights) @ weights[..., :seen].square_()).squeeze(2)
    return out, total
