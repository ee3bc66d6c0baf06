"""Tokens in few bits, as a state keeps them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from dofla.attention.constants import FREE, LOG_ZERO
from dofla.attention.state import Tensors


@dataclass(frozen=True)
class CodedTokens(Tensors):
    """n tokens, others in each head: codes and scales of keys and of values [B, Hkv, n, bytes], uint8; and ``score``
    [B, Hkv, n], int16, :data:`FREE` for free slots and padding. A tier has free slots in front, then the newest token,
    and the oldest at the end: one that enters a free slot moves no other."""

    key: Tensor
    key_scale: Tensor
    value: Tensor
    value_scale: Tensor
    score: Tensor

    @property
    def log_weight(self) -> Tensor:
        """The log-weights of the tokens [B, Hkv, n], float32: LOG_ZERO for free slots and padding, 0 for all others."""
        return torch.zeros_like(self.score, dtype=torch.float32).masked_fill(self.score == FREE, LOG_ZERO)

    def __len__(self) -> int:
        return self.score.shape[-1]

    def __getitem__(self, slots: slice) -> CodedTokens:
        return self.map(lambda x: x[:, :, slots])

    def then(self, later: CodedTokens) -> CodedTokens:
        """These tokens followed by ``later``."""
        return CodedTokens(*(torch.cat([getattr(x, field.name) for x in (self, later)], 2) for field in fields(self)))

    def with_slots(self, slots: int) -> CodedTokens:
        """A tier of so many slots with the same tokens, behind free ones."""
        free = slots - len(self)
        key, key_scale, value, value_scale = (F.pad(x, (0, 0, free, 0)) for x in [*vars(self).values()][:4])
        return CodedTokens(key, key_scale, value, value_scale, F.pad(self.score, (free, 0), value=FREE))

    def oldest_first(self) -> CodedTokens:
        """A tier's tokens the other way round, behind its free slots."""
        slot, free = torch.arange(len(self), device=self.score.device), (self.score == FREE).sum(-1, keepdim=True)
        return self.take(torch.where(slot < free, slot, len(self) - 1 + free - slot))

    def take(self, index: Tensor) -> CodedTokens:
        """The tokens at ``index`` [B, Hkv, m]."""
        return self.map(lambda x: gather_tokens(x, index))


def gather_tokens(x: Tensor, index: Tensor) -> Tensor:
    """The entries of ``x`` [B, Hkv, n] or [B, Hkv, n, d] at ``index`` [B, Hkv, m], which differs between heads."""
    return x.gather(2, index if x.ndim == 3 else index.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))
