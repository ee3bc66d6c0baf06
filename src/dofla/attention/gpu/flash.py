"""Exact causal attention of a call by torch's flash attention, merged with attention to what the cache holds."""

from __future__ import annotations

import torch
from torch import Tensor

from dofla.attention.constants import LOG_ZERO
from dofla.attention.exact import merge

_ELEMENTS = 2**23
"""Attention weights at once."""


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, real: Tensor, unseen: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention of the last L of P tokens, all of which are real, to those before them.

    Args:
        query: [B, H, L, d].
        key: [B, Hkv, P, d].
        value: [B, Hkv, P, dv].
        real: [B, P], False for free slots.
        unseen: how many tokens at the beginning are free slots.
        scaling: of the scores.

    Returns:
        Output [B, H, L, dv] and log-normalizer [B, H, L].
    """
    groups, before = query.shape[1] // key.shape[1], key.shape[2] - query.shape[2]
    new = (x[:, :, before:].to(query.dtype).repeat_interleave(groups, 1) for x in (key, value))
    if query.is_cuda:
        out, normalizer, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, *new, 0.0, True, scale=scaling)
    else:
        out, normalizer = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, *new, 0.0, True, scale=scaling
        )
    if unseen == before:
        return out, normalizer
    outs, normalizers, hidden = [], [], ~real[:, None, None, None, :before]
    for rows in query.split(max(1, _ELEMENTS // (len(query) * query.shape[1] * before)), 2):
        scores = (rows * scaling).unflatten(1, (-1, groups)).flatten(2, 3) @ key[:, :, :before].to(rows.dtype).mT
        scores = scores.float().unflatten(2, (groups, -1)).masked_fill_(hidden, LOG_ZERO)
        normalizers.append(scores.logsumexp(-1).flatten(1, 2))
        share = scores.softmax(-1).flatten(2, 3).to(rows.dtype)
        outs.append((share @ value[:, :, :before].to(rows.dtype)).unflatten(2, (groups, -1)).flatten(1, 2))
    return merge((out, normalizer), (torch.cat(outs, 2), torch.cat(normalizers, 2)))
