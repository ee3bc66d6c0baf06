"""Exact tokens in int8: a window and sinks of twice as many tokens as in bfloat16, four times as in float32.

A vector becomes integers from -127 to 127 and one power of two, the integer format of the Open Compute Project's
Microscaling specification with the whole vector as its block. An integer of seven bits times a power of two is exact
in every floating-point type, so packing what was unpacked gives the same bytes, and it does not matter how often or
where a token is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dofla.attention.state import Tensors, TokenBuffer

_LARGEST = 127
_EXPONENTS = (-120, 120)
"""Powers of two whose reciprocals float32 has too."""


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
        new = len(later)

        def joined(name: str, dim: int) -> Tensor:
            old = getattr(self, name)
            return torch.cat([old.narrow(dim, new, old.shape[dim] - new), getattr(later, name)], dim)

        vectors, numbers = ("key", "value"), ("key_exponent", "value_exponent")
        return PackedTokens(**{n: joined(n, 2) for n in (*vectors, *numbers)}, log_weight=joined("log_weight", 1))
