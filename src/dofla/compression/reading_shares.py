"""Which KV heads look far back: the division of a second reading's attention among them.

KVzip ranks the tokens of a prompt over all heads of the model at once, and evicts the rest. The division among heads is
nearly that of any other prompt, and so one text tells it (``docs/research/cache.md``).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

FRACTIONS = 1 / 4, 1 / 8, 1 / 16
"""Tokens that are kept over all: the means of what a head has of them count."""


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
