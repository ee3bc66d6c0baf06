"""The readable truth: quadratic, in log space, best called in float64. Every other form is tested against it."""

import torch
from torch import Tensor

from dofla.attention.constants import LOG_ZERO


def naive_attention(
    a: Tensor,
    b: Tensor,
    value: Tensor,
    *,
    weight: Tensor | None = None,
    query: Tensor | None = None,
    key: Tensor | None = None,
    scaling: float = 1.0,
    window: int = 0,
    sinks: int = 0,
    causal: bool = True,
) -> Tensor:
    """Attention of a whole sequence, every pair written out.

    Args:
        a: log-features of queries [B, H, L, M].
        b: log-features of keys [B, Hkv, L, M].
        value: values [B, Hkv, L, dv].
        weight: key weights [B, L], 0 for padding; default all ones.
        query, key: raw queries [B, H, L, d] and keys [B, Hkv, L, d]; needed with a window or sinks.
        scaling: exact scores are ``scaling · q·k``.
        window: the last ``window`` keys (the query's own position included) get exact scores; without ``causal``,
            all keys closer than ``window``.
        sinks: the first ``sinks`` keys of nonzero weight get exact scores.
        causal: query i sees keys up to i; otherwise all.

    Returns:
        [B, H, L, dv]; a row that sees no key is zero.
    """
    batch, heads, length, _ = a.shape
    groups = heads // b.shape[1]
    b, value = (t.repeat_interleave(groups, dim=1) for t in (b, value))
    weight = a.new_ones(batch, length) if weight is None else weight.to(a)

    logits = torch.logsumexp(a.unsqueeze(-2) + b.unsqueeze(-3), dim=-1)
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    if window or sinks:
        assert query is not None
        assert key is not None
        exact = scaling * query @ key.repeat_interleave(groups, dim=1).mT
        near = (distance if causal else distance.abs()) < window
        first = (weight > 0) & ((weight > 0).cumsum(-1) <= sinks)
        logits = torch.where(near | first[:, None, None, :], exact, logits)
    logits = logits + weight.log().clamp_min(LOG_ZERO)[:, None, None, :]
    hidden = (weight == 0)[:, None, None, :] | ((distance < 0) & causal)
    logits = logits.masked_fill(hidden, -torch.inf)
    top = logits.amax(dim=-1, keepdim=True).clamp_min(LOG_ZERO)
    weights = torch.exp(logits - top)
    total = weights.sum(dim=-1, keepdim=True)
    value = value.masked_fill((weight == 0)[:, None, :, None], 0)
    return weights @ value / torch.where(total > 0, total, 1)
