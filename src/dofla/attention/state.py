"""The state that linear attention carries from one token to the next, and its two operations: absorb and read.

Instead of the usual numerator ``S = Σ_j exp(b_j) v_j`` and denominator ``u = Σ_j exp(b_j)``, whose entries overflow on
real models, the state keeps per feature the *mean* value ``S / u`` and the *log-mass* ``log u``: as many numbers, but a
mean never leaves the range of the values and a log-mass grows like the largest key. Linear attention then reads as
softmax attention over M slots: ``out = softmax(a + log_mass) @ mean``.

The log-mass is float64: one small key changes the logarithm of a large mass by less than the last digit of a float32,
and after a long decode all those lost keys would have been many. M features cost 4·M·dv + 8·M bytes per KV head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from dofla.attention.constants import LOG_ZERO


def accumulable(t: Tensor) -> Tensor:
    """``t`` in a precision fit for sums over many tokens: half precisions become float32, float64 stays."""
    return t if t.dtype == torch.float64 else t.float()


def widest(t: Tensor) -> torch.dtype:
    """The most precise type the device of ``t`` computes in: float64, but for Apple's GPUs."""
    return torch.float32 if t.device.type == "mps" else torch.float64


@dataclass(frozen=True)
class Tensors:
    """Shared by the dataclasses below: bundles of tensors whose first dimension is the batch."""

    def map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        return combined(fn, self)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors held, over the whole batch."""
        parts = [part for field in fields(self) if (part := getattr(self, field.name)) is not None]
        return sum(part.bytes if isinstance(part, Tensors) else part.numel() * part.element_size() for part in parts)

    def copy(self) -> Self:
        """A copy that later updates of this one do not touch."""
        return self.map(torch.clone)

    def reorder(self, index: Tensor) -> Self:
        """Row ``index[n]`` becomes row n (beam search, batch selection)."""
        return self.map(lambda t: t.index_select(0, index.to(t.device)))


def combined(fn: Callable[..., Tensor], *parts: Any) -> Any:
    """Bundles of the same layer, or tensors, as one: ``fn`` of their tensors, place by place."""
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        return fn(*parts)
    changed = {x.name: combined(fn, *(getattr(part, x.name) for part in parts)) for x in fields(first)}
    return replace(first, **changed)


def side_by_side(parts: Sequence[Any]) -> Any:
    """Bundles of the same layer as one whose batch is all of theirs, in this order."""
    return combined(lambda *tensors: torch.cat(tensors), *parts)


@dataclass(frozen=True)
class FeatureState(Tensors):
    """The compressed past: ``mean`` [B, Hkv, M, dv], float32 (or float64), and ``log_mass`` [B, Hkv, M], float64."""

    mean: Tensor
    log_mass: Tensor

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        features: int,
        value_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> FeatureState:
        mean = torch.zeros(batch, heads, features, value_dim, dtype=dtype, device=device)
        return cls(mean, torch.full((batch, heads, features), LOG_ZERO, dtype=widest(mean), device=device))

    def absorb(self, b: Tensor, value: Tensor) -> FeatureState:
        """The state after the keys with log-features ``b`` [B, Hkv, L, M] and values [B, Hkv, L, dv]."""
        top = torch.maximum(self.log_mass.to(b.dtype), b.amax(dim=-2)).detach()
        return self.absorb_levelled(top, torch.exp(b - top.unsqueeze(-2)), value)

    def absorb_levelled(self, top: Tensor, keys: Tensor, value: Tensor) -> FeatureState:
        """:meth:`absorb` for keys whose features [B, Hkv, L, M] are at hand, measured from ``top`` [B, Hkv, M]."""
        old = torch.exp(self.log_mass - top)
        mass = old + keys.sum(dim=-2)
        left, share = (old / mass).to(value.dtype), (1 / mass).to(value.dtype)
        mean = left.unsqueeze(-1) * self.mean + share.unsqueeze(-1) * (keys.mT @ value)
        return FeatureState(mean, top + mass.log())

    def read(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to the state with queries of log-features ``a`` [B, H, L, M]: output [B, H, L, dv] and log-normalizer
        [B, H, L]."""
        batch, heads, length, features = a.shape
        kv_heads, value_dim = self.mean.shape[1], self.mean.shape[-1]
        grouped = a.reshape(batch, kv_heads, -1, features)
        logits = grouped + self.log_mass.to(a.dtype).unsqueeze(-2)
        out = torch.softmax(logits, dim=-1) @ self.mean
        normalizer = torch.logsumexp(logits, dim=-1)
        return out.view(batch, heads, length, value_dim), normalizer.view(batch, heads, length)


@dataclass(frozen=True)
class TokenBuffer(Tensors):
    """A fixed number n of tokens kept as they are: ``key`` [B, Hkv, n, d], ``value`` [B, Hkv, n, dv] and
    ``log_weight`` [B, n], which is LOG_ZERO where the place is free or the token is padding."""

    key: Tensor
    value: Tensor
    log_weight: Tensor

    @classmethod
    def empty(cls, like_key: Tensor, like_value: Tensor, size: int) -> TokenBuffer:
        """``size`` free places for tokens with keys like [B, Hkv, L, d] and values like [B, Hkv, L, dv]."""
        batch, heads = like_key.shape[:2]
        return cls(
            like_key.new_zeros(batch, heads, size, like_key.shape[-1]),
            like_value.new_zeros(batch, heads, size, like_value.shape[-1]),
            torch.full((batch, size), LOG_ZERO, dtype=torch.float32, device=like_key.device),
        )

    def __len__(self) -> int:
        return self.key.shape[-2]

    def __getitem__(self, places: slice) -> TokenBuffer:
        return TokenBuffer(self.key[:, :, places], self.value[:, :, places], self.log_weight[:, places])

    def then(self, later: TokenBuffer) -> TokenBuffer:
        """These tokens followed by ``later``."""
        return TokenBuffer(
            torch.cat([self.key, later.key.to(self.key.dtype)], dim=-2),
            torch.cat([self.value, later.value.to(self.value.dtype)], dim=-2),
            torch.cat([self.log_weight, later.log_weight], dim=-1),
        )


def known_full(log_weight: Tensor) -> bool:
    """True if no place is free and it is cheap to know: on a GPU, asking costs more than what it may save, and
    a compiled graph cannot ask."""
    on_cpu = log_weight.device.type == "cpu"
    return on_cpu and not torch.compiler.is_compiling() and bool((log_weight > LOG_ZERO).all())


def log_weights(weight: Tensor) -> Tensor:
    """The logarithms [B, L], float32, of key weights [B, L]: LOG_ZERO for padding, whose weight is 0."""
    weight = weight.contiguous()
    return torch.where(weight > 0, weight.float().clamp_min(torch.finfo(torch.float32).tiny).log(), LOG_ZERO)


def masked(key: Tensor, value: Tensor, log_weight: Tensor | None) -> TokenBuffer:
    """Tokens with padding made harmless; without ``log_weight`` [B, L] there is none."""
    if log_weight is None:
        log_weight = torch.zeros(key.shape[0], key.shape[-2], dtype=torch.float32, device=key.device)
        return TokenBuffer(key, value, log_weight)
    hidden = (log_weight <= LOG_ZERO)[:, None, :, None]
    return TokenBuffer(key.masked_fill(hidden, 0), value.masked_fill(hidden, 0), log_weight)
