"""Which KV heads look far back: the division of a second reading's attention among them.

KVzip ranks the tokens of a prompt over all heads of the model at once, and evicts the rest. The division among heads is
nearly that of any other prompt, and so one text tells it (``docs/research/cache.md``). A text stands there twice in a
row, and a token counts in a KV head by the most attention that a query of the second time pays to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dofla.attention import LOG_ZERO, exact_scores
from dofla.integration.recorder import AttentionCall

_ROWS = 32
"""Queries at a time: their attention stays in a processor's cache."""

FRACTIONS = 1 / 4, 1 / 8, 1 / 16
"""Tokens that are kept over all: the means of what a head has of them count."""


@dataclass
class SecondReading:
    """A visitor of attention calls on a text that stands there twice, one sequence without padding."""

    attention: dict[str, Tensor] = field(default_factory=dict)  # most attention to tokens of the first time [Hkv, n]

    def __call__(self, call: AttentionCall) -> None:
        """Add what a layer attends to."""
        heads, length = call.key.shape[1:3]
        most = torch.full((heads, length // 2), LOG_ZERO, device=call.key.device)
        for start in range(length // 2, length, _ROWS):
            query = call.query[:, :, start : start + _ROWS]
            rows = query.shape[2]
            scores = exact_scores(query, call.key[:, :, : start + rows], call.scaling)  # [1, H, R, <= L]
            later = torch.ones(rows, rows, dtype=torch.bool, device=scores.device).triu(1)
            scores[..., start:].masked_fill_(later, LOG_ZERO)
            normalizer = scores.logsumexp(-1, keepdim=True)
            shares = scores[..., : length // 2].sub_(normalizer).unflatten(1, (heads, -1))
            most = torch.maximum(most, shares.amax((0, 2, 3)))
        self.attention[call.name] = most.exp()


def reading_shares(attention: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """The tokens of each KV head among those with the most attention [Hkv, n] over all heads, relative to the mean of
    all heads; by layer."""
    ranked = torch.cat([own.cpu() for own in attention.values()])
    total = torch.zeros(len(ranked))
    for part in FRACTIONS:
        kept = torch.zeros(ranked.numel())
        kept[ranked.flatten().topk(max(1, round(part * ranked.numel()))).indices] = 1
        share = kept.view_as(ranked).mean(1)
        total += share / share.mean() / len(FRACTIONS)
    parts = total.split([len(own) for own in attention.values()])
    return {name: own.tolist() for name, own in zip(attention, parts, strict=True)}
