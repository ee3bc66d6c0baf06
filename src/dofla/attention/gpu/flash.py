"""Exact causal attention of a call by torch's flash attention, merged with attention to what the cache holds."""

from __future__ import annotations

import torch
from torch import Tensor

from dofla.attention.constants import LOG_ZERO
from dofla.attention.drawn import ELEMENTS, Line
from dofla.attention.exact import merge


def flash_attention(query: Tensor, line: Line, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention of queries [B, H, L, d], those of the last L tokens of a line, all of which are real.

    Returns:
        Output [B, H, L, dv] and log-normalizer [B, H, L].
    """
    groups, before = query.shape[1] // line.key.shape[1], len(line) - query.shape[2]
    key, value = (x.to(query.dtype) for x in (line.key, line.value))
    new = (x[:, :, before:].repeat_interleave(groups, 1) for x in (key, value))
    if query.is_cuda:
        out, normalizer, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, *new, 0.0, True, scale=scaling)
    else:
        out, normalizer = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, *new, 0.0, True, scale=scaling
        )
    if not before:
        return out, normalizer
    outs, normalizers, hidden = [], [], ~line.real[:, :, None, None, :before]
    for rows in query.split(max(1, ELEMENTS // (len(query) * query.shape[1] * before)), 2):
        scores = (rows * scaling).unflatten(1, (-1, groups)).flatten(2, 3) @ key[:, :, :before].mT
        scores = scores.float().unflatten(2, (groups, -1)).masked_fill_(hidden, LOG_ZERO)
        normalizers.append(scores.logsumexp(-1).flatten(1, 2))
        share = scores.softmax(-1).flatten(2, 3).to(rows.dtype)
        outs.append((share @ value[:, :, :before]).unflatten(2, (groups, -1)).flatten(1, 2))
    return merge((out, normalizer), (torch.cat(outs, 2), torch.cat(normalizers, 2)))
