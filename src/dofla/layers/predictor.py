"""The importance that a token is going to have, predicted from what its layer reads: a linear surrogate of a second
reading (KVzap, arXiv 2601.07891)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

LEAST, MOST = -10.0, 4.0
"""Bounds of the logarithm of importance. Hardly a token gets more, and what gets less is evicted anyway."""


class ImportancePredictor(nn.Module):
    """The importance of tokens in each KV head: the sum of the squared attention weights that queries of a second
    reading of the text would give them. Its logarithm is a linear function of the input of the attention module.

    Args:
        heads: KV heads.
        width: numbers of a token in the module's input.

    Attributes:
        weight: [Hkv, width + 1], float32; the last number of a row stands alone.
    """

    weight: Tensor

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(heads, width + 1, dtype=torch.float32))

    @torch.no_grad()
    def reset(self) -> None:
        """Let all tokens be equally important."""
        self.weight.zero_()

    @torch.no_grad()
    def take(self, other: "ImportancePredictor", heads: Sequence[int]) -> None:
        """Take the function of some KV heads of another one."""
        self.weight.copy_(other.weight[list(heads)])

    @torch.no_grad()
    def forward(self, hidden: Tensor) -> Tensor:
        """Importance [B, Hkv, L], float32, of tokens whose input is [B, L, width]."""
        weight = self.weight.to(hidden.device)
        logarithm = hidden.float() @ weight[:, :-1].mT + weight[:, -1]
        return logarithm.clamp(LEAST, MOST).exp().mT


def input_of(args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """The input [B, L, D] of an attention module among its arguments; None if it comes in another form."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    return hidden if isinstance(hidden, Tensor) and hidden.ndim == 3 else None
