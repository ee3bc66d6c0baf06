"""Tokens in few bits, as a state keeps them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dofla.attention.state import Tensors


@dataclass(frozen=True)
class CodedTokens(Tensors):
    """n tokens: codes and scales of keys and of values [B, Hkv, n, bytes], uint8, and ``log_weight`` [B, n], which is
    LOG_ZERO where the place is free or the token is padding."""

    key: Tensor
    key_scale: Tensor
    value: Tensor
    value_scale: Tensor
    log_weight: Tensor

    def __len__(self) -> int:
        return self.log_weight.shape[-1]

    def __getitem__(self, places: slice) -> CodedTokens:
        return self.map(lambda x: x[:, places] if x.ndim == 2 else x[:, :, places])

    def then(self, later: CodedTokens) -> CodedTokens:
        """These tokens followed by ``later``."""
        pairs = ((getattr(self, field.name), getattr(later, field.name)) for field in fields(self))
        return CodedTokens(*(torch.cat(pair, 1 if pair[0].ndim == 2 else 2) for pair in pairs))
