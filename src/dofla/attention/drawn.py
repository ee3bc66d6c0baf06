"""Exact causal attention of a call, and the attention that each token drew, in plain torch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dofla.attention.constants import DECAY, LOG_ZERO
from dofla.attention.state import accumulable

NEIGHBORS = 64
"""Queries right after a token whose attention to it does not count: neighbors say little of who needs it later."""
LATELY = 512
"""Last queries of a call, whose attention counts once more: earlier ones would hardly count."""
ELEMENTS = 2**23
"""Attention weights at once."""


@dataclass(frozen=True)
class Line:
    """The tokens that the queries of a call attend to: cached ones, then the new ones."""

    key: Tensor  # [B, Hkv, P, d]
    value: Tensor  # [B, Hkv, P, dv]
    rank: Tensor  # [B, Hkv, P], how many tokens stand before each; negative for free slots and padding
    padded: bool  # True if any new token is padding

    def __len__(self) -> int:
        return self.key.shape[2]

    @property
    def vectors(self) -> tuple[Tensor, Tensor]:
        return self.key, self.value


@dataclass(frozen=True)
class Drawn:
    """Squared attention weights that tokens drew [B, Hkv, P], float32: in all, and lately, as decode counts. Those are
    weights among the tokens outside the local window and the sinks, of queries that count a 64th less than the next."""

    total: Tensor  # summed over the call's queries but the NEIGHBORS after the token
    lately: Tensor  # ... over the last queries


def exact_causal(query: Tensor, line: Line, window: int, sinks: int, scaling: float) -> tuple[Tensor, Drawn]:
    """Output [B, H, L, dv] of queries [B, H, L, d] of a line's last tokens, zeros for padding; and what tokens drew."""
    key, value, real = accumulable(line.key), accumulable(line.value), line.rank >= 0
    before, length = len(line) - query.shape[2], query.shape[2]
    out = value.new_empty(*query.shape[:3], value.shape[-1])
    total = value.new_zeros(*value.shape[:3], dtype=torch.float32)
    size = max(1, ELEMENTS // (len(query) * query.shape[1] * len(line)))
    for start in range(0, length, size):
        rows, end = slice(start, min(start + size, length)), before + min(start + size, length)
        share, distance = _weights(query[:, :, rows], key[:, :, :end], real[:, :, :end], before + start, scaling)
        piece = (share.flatten(2, 3) @ value[:, :, :end]).unflatten(2, share.shape[2:4])
        out[:, :, rows] = piece.flatten(1, 2)
        total[:, :, :end] += share.square_().masked_fill_(distance < NEIGHBORS, 0).sum((2, 3))
    if line.padded:
        out = out * real[:, :1, before:, None]  # a query that is padding sees nothing
    return out, Drawn(total, _lately(query[:, :, -LATELY:], key, line.rank >= sinks, window, scaling))


def _lately(query: Tensor, key: Tensor, far: Tensor, window: int, scaling: float) -> Tensor:
    share, distance = _weights(query, key, far, key.shape[2] - query.shape[2], scaling, window)
    hidden = (distance < window) | ~far[:, :, None, None]  # of a query that sees none of them all weights are alike
    decay = (1 - 1 / DECAY) ** torch.arange(query.shape[2] - 1, -1, -1, dtype=torch.float32, device=query.device)
    return (share.masked_fill_(hidden, 0).square_() * decay.unsqueeze(-1)).sum((2, 3))


def _weights(
    query: Tensor, key: Tensor, seen: Tensor, first: int, scaling: float, nearest: int = 0
) -> tuple[Tensor, Tensor]:
    """Attention weights [B, Hkv, G, L, P] of queries, those of the tokens from ``first`` on, to the tokens of a line
    that are ``seen`` [B, Hkv, P] and at least ``nearest`` behind; and how far behind tokens are [L, P]."""
    place = torch.arange(key.shape[2], device=query.device)
    distance = place[first : first + query.shape[2], None] - place
    hidden = (distance < nearest) | ~seen.unsqueeze(2)
    asked = (accumulable(query) * scaling).unflatten(1, (key.shape[1], -1))
    scores = (asked.flatten(2, 3) @ key.mT).unflatten(2, asked.shape[2:4])
    return scores.masked_fill_(hidden.unsqueeze(2), LOG_ZERO).softmax(-1), distance
