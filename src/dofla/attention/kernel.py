"""The kernel between every query and every key, exact and approximate, as logarithms: what the losses look at."""

import torch
from torch import Tensor

from dofla.attention.constants import SMALLEST_TRUSTED_MASS
from dofla.attention.state import accumulable


def exact_scores(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """``scaling · q·k`` for all pairs: queries [B, H, L, d], keys [B, Hkv, S, d] → [B, H, L, S], float32 at least."""
    batch, heads, length, head_dim = query.shape
    grouped = accumulable(query).reshape(batch, key.shape[1], -1, head_dim)
    return (scaling * grouped @ accumulable(key).mT).view(batch, heads, length, -1)


def log_kernel(a: Tensor, b: Tensor) -> Tensor:
    """``logsumexp_m(a[i, m] + b[j, m])`` for all pairs, exactly, at the cost of one matrix product: log-features of
    queries [B, H, L, M] and of keys [B, Hkv, S, M] → [B, H, L, S].

    Pairs whose features hardly overlap underflow in the product; those few are recomputed in log space, so the result
    is right to float precision for log-features of any size.
    """
    batch, heads, length, features = a.shape
    kv_heads, keys = b.shape[1], b.shape[2]
    a = a.reshape(batch, kv_heads, -1, features)
    a_top = a.amax(dim=-1, keepdim=True).detach()
    b_top = b.amax(dim=-1, keepdim=True).detach()
    total = torch.exp(a - a_top) @ torch.exp(b - b_top).mT
    lost = (total < SMALLEST_TRUSTED_MASS).nonzero(as_tuple=True)
    if lost[0].numel():
        total = total.index_put(lost, total.new_ones(()))
    log_total = total.log() + a_top + b_top.mT
    if lost[0].numel():
        n, h, i, j = lost
        log_total = log_total.index_put(lost, torch.logsumexp(a[n, h, i] + b[n, h, j], dim=-1))
    return log_total.view(batch, heads, length, keys)
