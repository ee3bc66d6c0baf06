"""Exact tokens in int8: a window and sinks of twice as many tokens as in bfloat16, four times as in float32.

A vector becomes integers from -127 to 127 and one power of two, the integer format of the Open Compute Project's
Microscaling specification with the whole vector as its block. An integer of seven bits times a power of two is exact
in every floating-point type, so packing what was unpacked gives the same bytes, and it does not matter how often or
where a token is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from dofla.attention.state import Tensors, TokenBuffer

_LARGEST = 127
_EXPONENTS = (-120, 120)
"""Powers of two whose reciprocals float32 has too."""
_OF_HEADS = ("key", "key_exponent", "value", "value_exponent")
"""The fields of :class:`PackedTokens` that each head has for itself."""


def pack(x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors [..., d] as integers [..., d] and exponents [...], both int8: ``x ≈ integers · 2 ** exponents``."""
    x = x if x.dtype == torch.float64 else x.float()
    exponents = (torch.frexp(x.abs().amax(-1)).exponent - 7).clamp(*_EXPONENTS)
    integers = (x * power_of_two(-exponents)).round().clamp(-_LARGEST, _LARGEST)
    return integers.to(torch.int8), exponents.to(torch.int8)


def unpack(integers: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """The reverse of :func:`pack`, exactly."""
    return (integers * power_of_two(exponents)).to(dtype)


def power_of_two(exponents: Tensor) -> Tensor:
    """``2 ** exponents`` [..., 1] as float32 from its bits: at once, and exact whatever the library of the machine."""
    return ((exponents.unsqueeze(-1).to(torch.int32) + 127) << 23).view(torch.float32)


def rounded(x: Tensor) -> Tensor:
    """``x`` as it comes back from eight bits; gradients pass as if it had not been there, and so do NaN and infinity,
    which integers cannot hold, as NaN."""
    return unpack(*pack(x.detach()), x.dtype) + (x - x.detach())


@dataclass(frozen=True)
class PackedTokens(Tensors):
    """A :class:`TokenBuffer` in int8: ``key`` [B, Hkv, n, d], ``value`` [B, Hkv, n, dv] and their exponents
    [B, Hkv, n], all int8; ``log_weight`` [B, n]."""

    key: Tensor
    key_exponent: Tensor
    value: Tensor
    value_exponent: Tensor
    log_weight: Tensor

    @classmethod
    def of(cls, tokens: TokenBuffer, pack: Callable[[Tensor], tuple[Tensor, Tensor]] = pack) -> PackedTokens:
        return cls(*pack(tokens.key), *pack(tokens.value), tokens.log_weight)

    def __len__(self) -> int:
        return self.log_weight.shape[-1]

    def unpacked(self, dtype: torch.dtype) -> TokenBuffer:
        key, value = unpack(self.key, self.key_exponent, dtype), unpack(self.value, self.value_exponent, dtype)
        return TokenBuffer(key, value, self.log_weight)

    def shifted(self, later: PackedTokens) -> PackedTokens:
        """The same number of tokens, with ``later`` at the end and the oldest dropped."""
        new, parts = len(later), []
        for field in fields(self):
            old = getattr(self, field.name)
            dim = min(old.ndim - 1, 2)
            parts.append(torch.cat([old.narrow(dim, new, old.shape[dim] - new), getattr(later, field.name)], dim))
        return PackedTokens(*parts)

    def of_heads(self, heads: slice) -> PackedTokens:
        """Tokens of some heads side by side."""
        return replace(self, **{name: getattr(self, name)[:, heads] for name in _OF_HEADS})

    @staticmethod
    def of_all(groups: Sequence[PackedTokens]) -> PackedTokens:
        """Tokens of all heads of some groups, which have their log-weights in common."""
        joined = {name: torch.cat([getattr(group, name) for group in groups], 1) for name in _OF_HEADS}
        return replace(groups[0], **joined)
