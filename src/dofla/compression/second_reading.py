"""Which KV heads look far back: those that a second reading of a text attends with (KVzip, Kim et al. 2025, arXiv
2505.23416).

A text stands there twice in a row. A token counts in a head by the most attention that a query of the second time
pays to it. KVzip ranks the tokens of a prompt so, over all heads of the model at once, and evicts the rest. The
division among heads is nearly that of any other prompt, and so one text tells it (``docs/research/cache.md``).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dofla.integration.recorder import AttentionCall

FRACTIONS = 1 / 4, 1 / 8, 1 / 16
"""Tokens that are kept over all: the means of what a head has of them count."""


@dataclass
class SecondReading:
    """A visitor of attention calls on a text that stands there twice, one sequence without padding."""

    attention: dict[str, Tensor] = field(default_factory=dict)  # most attention to tokens of the first time [Hkv, n]

    def __call__(self, call: AttentionCall) -> None:
        """Add what a layer attends to."""
        heads, length = call.key.shape[1:3]
        most = torch.zeros(heads, length // 2, device=call.key.device)
        for rows in call.rows_from(length // 2):
            attention = call.log_weights(rows).exp()[0, :, :, : length // 2]  # [H, R, n]
            most = torch.maximum(most, attention.unflatten(0, (heads, -1)).amax((1, 2)))
        self.attention[call.name] = most.cpu()

    def shares(self) -> dict[str, list[float]]:
        """The tokens of each KV head among those with the most attention over all heads, relative to the mean of all
        heads; by layer."""
        ranked = torch.cat([*self.attention.values()])
        total = torch.zeros(len(ranked))
        for part in FRACTIONS:
            kept = torch.zeros(ranked.numel())
            kept[ranked.flatten().topk(max(1, round(part * ranked.numel()))).indices] = 1
            share = kept.view_as(ranked).mean(1)
            total += share / share.mean() / len(FRACTIONS)
        parts = total.split([len(own) for own in self.attention.values()])
        return {name: own.tolist() for name, own in zip(self.attention, parts, strict=True)}
