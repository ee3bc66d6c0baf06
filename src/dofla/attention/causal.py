"""Exact causal attention where all tokens are retained, by torch's own kernels."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dofla.attention.drawn import ELEMENTS


def causal(query: Tensor, key: Tensor, value: Tensor, scaling: float, real: Tensor | None = None) -> Tensor:
    """Output [B, H, L, dv] of queries [B, H, L, d] of the last of the tokens with keys [B, Hkv, P, d] and values
    [B, Hkv, P, dv]. Those that are not ``real`` [B, Hkv or 1, P] are seen by nobody, and have an output of zeros; by
    default all are, and none stands before the queries'."""
    key, value = key.to(query.dtype), value.to(query.dtype)
    if real is None:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    tokens, length = real.shape[2], query.shape[2]
    if real.shape[1] > 1:
        real = real.repeat_interleave(query.shape[1] // real.shape[1], 1)
    before, place = tokens - length, torch.arange(tokens, device=query.device)
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    size = max(1, ELEMENTS // real.numel())  # the masks of more rows would be larger
    for start in range(0, length, size):
        rows, end = slice(start, min(start + size, length)), before + min(start + size, length)
        seen = real[:, :, None, :end] & (place[:end] <= place[before:][rows].unsqueeze(-1))
        out[:, :, rows] = scaled_dot_product_attention(
            query[:, :, rows], key[:, :, :end], value[:, :, :end], seen, scale=scaling, enable_gqa=True
        )
    return out.masked_fill(~real[:, :1, before:, None], 0)  # padding is that of all heads
