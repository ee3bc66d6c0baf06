"""Attention of a text that is read a second time, and what it pays to the tokens of the first."""

import torch
from torch import Tensor

from dofla.attention.constants import LOG_ZERO
from dofla.attention.state import accumulable


def attention_again(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, first: int, skipped: int = 0, real: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Causal attention of a piece of the second reading.

    Args:
        query: [B, H, L, d], of the last of the tokens.
        key: [B, Hkv, P, d].
        value: [B, Hkv, P, dv].
        scaling: of the scores.
        first: tokens of the first reading, the first of all.
        skipped: queries that do not count, the first of all.
        real: [B, P], False for padding, which counts for nothing; by default there is none.

    Returns:
        Output [B, H, L, dv], and the sums of squared weights of the first tokens [B, Hkv, n], float32 at least.
    """
    (batch, heads, tokens), (length, groups) = key.shape[:3], (query.shape[2], query.shape[1] // key.shape[1])
    before, keys = tokens - length, accumulable(key).mT
    asked = (accumulable(query) * scaling).unflatten(1, (heads, groups))
    counts = torch.ones(batch, 1, 1, length, device=key.device)
    counts[..., :skipped] = 0
    if real is not None:
        counts, hidden = counts * real[:, None, None, before:], ~real[:, None, None]
    out, total = value.new_empty(*query.shape[:3], value.shape[-1]), keys.new_zeros(batch, heads, first)
    at_once = 2**20 if key.device.type == "cpu" else 2**26  # on a CPU what stays in its cache
    rows = min(length, max(1, at_once // (batch * query.shape[1] * tokens)))
    later = torch.ones(rows, rows, dtype=torch.bool, device=key.device).triu(1)
    for start in range(0, length, rows):
        end = min(start + rows, length)
        weights = asked[:, :, :, start:end].flatten(2, 3) @ keys[..., : before + end]  # [B, Hkv, G R, <= P]
        own = weights.unflatten(2, (groups, -1))[..., before + start :]
        own.masked_fill_(later[: end - start, : end - start], LOG_ZERO)
        if real is not None:
            weights.masked_fill_(hidden[..., : before + end], LOG_ZERO)
        weights.sub_(weights.amax(-1, keepdim=True)).exp_()
        norm = weights.sum(-1, keepdim=True)
        piece = (weights.to(value.dtype) @ value[:, :, : before + end]) / norm
        out[:, :, start:end] = piece.unflatten(2, (groups, -1)).flatten(1, 2)
        share = norm.square().reciprocal().unflatten(2, (groups, -1)).squeeze(-1) * counts[..., start:end]
        total += (share.flatten(2).unsqueeze(2) @ weights[..., :first].square_()).squeeze(2)
    return out, total
