"""Exact causal attention of a call, and the attention that each token drew, in plain torch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dofla.attention.constants import DECAY, LOG_ZERO
from dofla.attention.importance import attention_and_importance
from dofla.attention.kernel import exact_scores

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

    def whole(self, queries: int) -> bool:
        """True if all of its tokens are real, and those of so many queries: cached ones have free slots."""
        return len(self) == queries and not self.padded

    @property
    def vectors(self) -> tuple[Tensor, Tensor]:
        return self.key, self.value


@dataclass(frozen=True)
class Drawn:
    """Squared attention weights that tokens drew [B, Hkv, P], float32: in all, and lately, as decode counts. Those are
    weights among the tokens outside the local window and the sinks, each query's a 256th less than the next one's."""

    total: Tensor  # summed over the call's queries but the NEIGHBORS after the token
    lately: Tensor | None  # ... over the last queries, if there are any


def exact_causal(query: Tensor, line: Line, window: int, sinks: int, scaling: float) -> tuple[Tensor, Drawn]:
    """Output [B, H, L, dv] of queries [B, H, L, d] of a line's last tokens, zeros for padding; and what tokens drew."""
    real, whole = line.rank >= 0, line.whole(query.shape[2])
    seen = None if whole else real
    out, total = attention_and_importance(query, *line.vectors, scaling, len(line), near=NEIGHBORS, real=seen)
    if line.padded:
        out = out * real[:, :1, -query.shape[2] :, None]  # a query that is padding sees nothing
    return out, Drawn(total.float(), drawn_lately(query, line, window, sinks, scaling))


def drawn_lately(query: Tensor, line: Line, window: int, sinks: int, scaling: float) -> Tensor:
    """Attention that a line's tokens drew lately [B, Hkv, P] from queries [B, H, L, d] of its last tokens: ``sinks``
    others stand before them, and they are at least ``window`` behind a query."""
    query, key, far = query[:, :, -LATELY:], line.key, line.rank >= sinks
    length, place = query.shape[2], torch.arange(key.shape[2], device=query.device)
    hidden = (place[len(line) - length :, None] - place < window) | ~far.unsqueeze(2)
    hidden = hidden.unsqueeze(2)  # [B, Hkv, 1, L, P]
    scores = exact_scores(query, key, scaling).unflatten(1, (key.shape[1], -1)).masked_fill_(hidden, LOG_ZERO)
    share = scores.softmax(-1).masked_fill_(hidden, 0)  # of a query that sees none of them all weights are alike
    decay = (1 - 1 / DECAY) ** torch.arange(length - 1, -1, -1, dtype=torch.float32, device=query.device)
    return (share.square_() * decay.unsqueeze(-1)).sum((2, 3))
