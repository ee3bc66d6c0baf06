"""A compressed cache in two hundred lines: unpacked, one token at a time, in float64. Read this first.

It holds the tokens that :class:`dofla.attention.CompressedHeads` holds, and attends to them as they come back from
their codes; the kernels do the same work many times faster, and are tested against this file. Where a token goes:

    new ──► local window ──► attention sinks       the first tokens to leave the window, as long as slots are free
            (int8)      └──► tier (3 bits) ──► evicted: the token with the lowest score, the newest excepted;
                                               none in a head that grows

A new rule of eviction is a small class, a :class:`Retention`. Try it in a compressed model with
:func:`dofla.compression.retention.retention`.
"""

from typing import Protocol

import torch
from torch import Tensor

from dofla.attention.coding import Tier
from dofla.attention.coding.coder import Coder, Codes
from dofla.attention.coding.heavy_hitters import WEIGHTS, weight_steps
from dofla.attention.constants import DECAY, GAIN, MOST_SCORE, MOST_STEPS
from dofla.attention.eight_bits import rounded
from dofla.attention.layout import HeadSizes


class Retention(Protocol):
    """A rule of eviction: the token of the tier with the lowest score goes when another enters. A new token has score
    0; then every query changes the scores."""

    def decay(self, score: Tensor) -> Tensor:
        """Scores [R, n] of tokens before a query, by the time it comes."""

    def score(self, weights: Tensor) -> Tensor:
        """The addition of a query [R, n], from its G heads' attention weights [R, G, n], normalized over the tier."""


class HeavyHitters:
    """The rule of the kernels: squared attention weights, of which a 256th is forgotten with every token. They are
    whole numbers, so that the same tokens survive on every machine."""

    def decay(self, score: Tensor) -> Tensor:
        return score - torch.ceil(score / DECAY)

    def score(self, weights: Tensor) -> Tensor:
        return (weights * weights * GAIN).round().sum(1)


class NaiveCache:
    """The compressed caches of R KV heads of one size, all sequences together.

    Args:
        size: tokens of each kind.
        tier: the coders of keys and values, for Hkv heads; R is a multiple of Hkv, heads of one sequence side by side.
        scaling: attention scores are ``scaling · q·k``.
        retention: the rule of eviction.

    Attributes:
        window, sinks: keys [R, n, d] and values [R, n, dv], as they come back from int8.
        codes: of the tier, those of keys and those of values, the newest token first.
        scores: of the tier [R, n].
    """

    def __init__(self, size: HeadSizes, tier: Tier, scaling: float, retention: Retention | None = None) -> None:
        self.size, self.coders, self.scaling = size, (tier.key, tier.value), scaling
        self.retention = retention or HeavyHitters()
        self.window: tuple[Tensor, Tensor] | None = None
        self.sinks: tuple[Tensor, Tensor] | None = None
        self.codes: tuple[Codes, Codes] | None = None
        self.scores = torch.zeros(0)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Read one token: queries [R, G, d], keys [R, d], values [R, dv] → outputs [R, G, dv], float64."""
        self._enter(rounded(key.float()), rounded(value.float()))
        held = [pair for pair in (self.window, self.sinks, self._decoded()) if pair is not None]
        keys, values = (torch.cat(side, 1) for side in zip(*held, strict=True))
        weights = (self.scaling * query.double() @ keys.mT).softmax(-1)
        if self.codes is not None and not self.size.grows:
            self.scores = self.retention.decay(self.scores) + self.retention.score(self._tier_weights(query))
            self.scores = self.scores.clamp(max=MOST_SCORE)
        return weights @ values

    def _enter(self, key: Tensor, value: Tensor) -> None:
        """A new token enters the window, and what leaves it becomes a sink, or enters the tier."""
        new = key.unsqueeze(1).double(), value.unsqueeze(1).double()
        self.window = _then(self.window, new)
        if self.window[0].shape[1] <= self.size.window:
            return
        oldest = self.window[0][:, :1], self.window[1][:, :1]
        self.window = self.window[0][:, 1:], self.window[1][:, 1:]
        if (self.sinks is None and self.size.sinks) or (self.sinks and self.sinks[0].shape[1] < self.size.sinks):
            self.sinks = _then(self.sinks, oldest)
            return
        codes = tuple(coder.encode(_heads(x, coder)) for coder, x in zip(self.coders, oldest, strict=True))
        entering = tuple((_rows(code), _rows(scale)) for code, scale in codes)
        self.codes = entering if self.codes is None else tuple(map(_then, entering, self.codes))  # type: ignore[assignment]
        zero = torch.zeros(len(key), 1)
        self.scores = torch.cat([zero, self.scores], 1) if self.scores.numel() else zero
        if not self.size.grows and self.scores.shape[1] > self.size.newest + self.size.heavy_hitters:
            self._evict()

    def _evict(self) -> None:
        """The token with the lowest score goes, the oldest of several; the newest stay in any case."""
        order = torch.arange(self.scores.shape[1])
        lowest = order[-1] - self.scores[:, self.size.newest :].flip(1).argmin(1, keepdim=True)
        stay = order.expand_as(self.scores)[order != lowest].view(len(self.scores), -1)
        assert self.codes is not None
        self.codes = tuple(  # type: ignore[assignment]
            tuple(part.take_along_dim(stay.unsqueeze(-1), 1) for part in side) for side in self.codes
        )
        self.scores = self.scores.gather(1, stay)

    def _decoded(self) -> tuple[Tensor, Tensor] | None:
        """Keys [R, n, d] and values [R, n, dv] of the tier, as they come back from their codes."""
        if self.codes is None:
            return None
        pairs = zip(self.coders, self.codes, strict=True)
        keys, values = (
            coder.unrotate(coder.decode(*(_heads(x, coder) for x in codes)).double()) for coder, codes in pairs
        )
        return _rows(keys), _rows(values)

    def _tier_weights(self, query: Tensor) -> Tensor:
        """Attention weights [R, G, n] over the tier. Scores must not depend on the order of sums: queries and keys are
        integers, weights powers of two in eighths of octaves, down to 13 octaves below the largest."""
        coder, groups = self.coders[0], query.shape[1]
        assert self.codes is not None
        keys, key_unit = (_rows(x) for x in coder.numbers(*(_heads(x, coder) for x in self.codes[0])))
        asked = query.unflatten(0, (-1, coder.heads)).flatten(1, 2).unsqueeze(2)  # [B, H, 1, d]
        queries, unit = (
            x.squeeze(2).unflatten(1, (coder.heads, groups)).flatten(0, 1) for x in coder.rotate_query_integer(asked)
        )
        products = torch.zeros(())
        for block in range(keys.shape[-2]):  # [R, G, n], in float32
            own = queries[..., block, :] @ keys[..., block, :].mT
            products = products + own * unit[..., block, :] * key_unit[..., block, :].mT
        per_step, _ = weight_steps(self.scaling, products.device)
        steps = (products * per_step).round().clamp(-MOST_STEPS, MOST_STEPS)
        below = (steps.amax(-1, keepdim=True) - steps).clamp(max=len(WEIGHTS) - 1)
        weights = WEIGHTS[below.long()]
        return weights / weights.sum(-1, keepdim=True).clamp_min(1)


def _then(first: tuple[Tensor, Tensor] | None, later: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two pairs of [R, n, ...], one behind the other."""
    return later if first is None else (torch.cat([first[0], later[0]], 1), torch.cat([first[1], later[1]], 1))


def _heads(x: Tensor, coder: Coder) -> Tensor:
    """[R, ...] as [B, Hkv, ...], which coders take."""
    return x.unflatten(0, (-1, coder.heads))


def _rows(x: Tensor) -> Tensor:
    """[B, Hkv, ...] as [R, ...]."""
    return x.flatten(0, 1)
