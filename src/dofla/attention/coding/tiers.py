"""A compressed cache: tiers of tokens between the window and the features, with ever fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dofla.attention import compiled, gpu
from dofla.attention.coding.coder import Coder, Numbers, encode_together, token_bytes
from dofla.attention.coding.heavy_hitters import ScoredTokens, chosen, pieces, seen, select_survivors
from dofla.attention.coding.tokens import CodedTokens
from dofla.attention.compiled.tiers import DTYPES
from dofla.attention.exact import exact_attention, merge
from dofla.attention.kernel import exact_scores
from dofla.attention.state import LOG_ZERO, TokenBuffer, accumulable

Tier = tuple[int, float]
"""A tier of a compressed cache: its number of tokens, and its bits per number."""


class CodedTiers(nn.Module):
    """The tiers of some KV heads of a layer, newest tokens first.

    Args:
        heads: KV heads.
        head_dim, value_dim: sizes of their keys and values, multiples of 8.
        tiers: tokens and bits of each, bits falling.
        heavy_hitters: slots of the last tier beyond those, for tokens that are retained while they draw attention
            (:mod:`dofla.attention.coding.heavy_hitters`).
    """

    def __init__(
        self, heads: int, head_dim: int, value_dim: int, tiers: Sequence[Tier], heavy_hitters: int = 0
    ) -> None:
        super().__init__()
        self.counts, self.heavy_hitters = [count for count, _ in tiers], heavy_hitters
        bits = [bits for _, bits in tiers]
        self.key, self.value = Coder(heads, head_dim, bits), Coder(heads, value_dim, bits)

    @property
    def slots(self) -> list[int]:
        """Slots of each tier, those of heavy hitters with the last."""
        return [*self.counts[:-1], self.counts[-1] + self.heavy_hitters]

    def reset(self) -> None:
        """Reset both coders."""
        self.key.reset()
        self.value.reset()

    def empty(self, batch: int, device: torch.device) -> tuple[CodedTokens | ScoredTokens, ...]:
        """The tiers before the first token."""
        heads = self.key.heads
        tiers = [self._empty(tier, (batch, heads, count), device) for tier, count in enumerate(self.slots)]
        if self.heavy_hitters:
            tiers[-1] = ScoredTokens.of(tiers[-1])
        return tuple(tiers)

    def _empty(self, tier: int, shape: tuple[int, ...], device: torch.device) -> CodedTokens:
        sizes = []
        for coder in (self.key, self.value):
            blocks = coder.dim // coder.block
            sizes += [coder.bytes_per_token(tier) - blocks, blocks]
        free = [torch.zeros(*shape, size, dtype=torch.uint8, device=device) for size in sizes]
        return CodedTokens(*free, torch.full((shape[0], shape[2]), LOG_ZERO, dtype=torch.float32, device=device))

    def attend(
        self,
        query: Tensor,
        leaving: TokenBuffer,
        held: Sequence[CodedTokens | ScoredTokens],
        scaling: float,
        real: Tensor | None = None,
        *,
        behind: bool = True,
    ) -> tuple[tuple[Tensor, Tensor], tuple[CodedTokens | ScoredTokens, ...], TokenBuffer | None]:
        """Attention to the tiers while tokens move through them; gradients pass as if nothing were rounded.

        Args:
            query: [B, H, L, d]; query i sees the tiers as they are once token i has entered.
            leaving: L tokens that enter the first tier, one after the other.
            held: what the tiers hold before; nothing at the beginning of a sequence.
            scaling: of the scores.
            real: [B, L], which queries are not padding; default all.
            behind: whether the tokens that leave the last tier are needed.

        Returns:
            Output [B, H, L, dv] and log-normaliser [B, H, L]; what the tiers hold after; and the L tokens that leave
            the last one, or None.
        """
        rotated, query_integers = self._rotated_queries(query)
        length = query.shape[-2]
        with torch.no_grad():
            moving, held = self.enter(leaving), held or self.empty(len(query), query.device)
        unrounded = self._unrounded(leaving, rotated.dtype)
        parts, after = [], []
        for tier, count in enumerate(self.counts):
            if self.heavy_hitters and tier + 1 == len(self.counts):
                real = torch.ones_like(moving.log_weight, dtype=torch.bool) if real is None else real
                part, stays, moving, unrounded = self._attend_scored(
                    query_integers, rotated, real, held[tier], ScoredTokens.of(moving), unrounded, scaling
                )
                parts.append(part)
                after.append(stays)
                break
            line = held[tier].then(moving)
            passing = _in_front(unrounded, count)
            parts.append(self._see(rotated, line, tier, passing, None, scaling))
            unrounded = passing and passing[:length]
            after.append(line[length:])
            moving = line[:length]
            if tier + 1 < len(self.counts):
                moving = self.aged(moving, tier)
        out, normaliser = reduce(merge, parts)
        left = self.unrotate(moving, len(self.counts) - 1, rotated.dtype, unrounded) if behind else None
        return (self.value.unrotate(out), normaliser), tuple(after), left

    def _rotated_queries(self, query: Tensor) -> tuple[Tensor, Callable[[slice], Numbers]]:
        """Queries rotated [B, H, L, d + 1], and what gives those of some tokens as integers, as
        :func:`select_survivors` takes them."""
        if gpu.usable(query):
            from dofla.attention.gpu.rotate_query import rotate_queries

            rotated, (numbers, units) = rotate_queries(self.key, query, query.shape[1] // self.key.heads)
            return rotated, lambda part: (numbers[:, :, part], units[:, :, part])
        rotated, beside = self.key.rotate_query(accumulable(query))
        rotated = torch.cat([rotated, beside.unsqueeze(-1)], -1)  # the means of keys stand in a number more, which is 1
        return rotated, lambda part: self.key.rotate_query_integer(query[:, :, part].detach())

    def _attend_scored(
        self,
        query_integers: Callable[[slice], Numbers],
        rotated: Tensor,
        real: Tensor,
        held: ScoredTokens,
        entering: ScoredTokens,
        unrounded: TokenBuffer | None,
        scaling: float,
    ) -> tuple[tuple[Tensor, Tensor], ScoredTokens, CodedTokens, TokenBuffer | None]:
        """The last tier, where it retains heavy hitters: as :meth:`attend`, output still rotated."""
        out, left, last = [], [], len(self.counts) - 1
        for part in pieces(len(entering)) if unrounded is None else [slice(None)]:
            line, passing = held.then(entering[part]), _in_front(unrounded, len(held))
            held, leaving, evicted_at = select_survivors(
                query_integers(part), real[:, part], line, self.counts[last], self.key, scaling
            )
            out.append(self._see(rotated[:, :, part], line, last, passing, evicted_at, scaling))
            left.append(line.chosen(leaving))
            if passing is not None:
                unrounded = replace(passing, key=chosen(passing.key, leaving), value=chosen(passing.value, leaving))
        outputs, normalisers = zip(*out, strict=True)
        moving = reduce(ScoredTokens.then, left).plain()
        return (torch.cat(outputs, 2), torch.cat(normalisers, 2)), held, moving, unrounded

    def _see(
        self,
        rotated: Tensor,
        line: CodedTokens | ScoredTokens,
        tier: int,
        unrounded: TokenBuffer | None,
        evicted_at: Tensor | None,
        scaling: float,
    ) -> tuple[Tensor, Tensor]:
        """Attend to a tier with rotated queries [B, H, L, d + 1].

        Args:
            line: the tokens that the tier held, and the L tokens that enter.
            evicted_at: as :func:`select_survivors` returns it; None if the oldest tokens are evicted first.

        Returns:
            Output [B, H, L, dv], rotated as well, and log-normalizer [B, H, L].
        """
        length = rotated.shape[-2]
        if unrounded is None and gpu.usable(rotated):
            from dofla.attention.gpu.tiers import attend

            key = self.key.for_kernels(line.key, line.key_scale, tier)
            value = self.value.for_kernels(line.value, line.value_scale, tier)
            return attend(rotated, key, value, line.log_weight, evicted_at, scaling)
        tokens = _through(self._decoded(line, tier, rotated.dtype), unrounded)
        tokens = replace(tokens, key=F.pad(tokens.key, (0, 1), value=1.0))
        if evicted_at is None:
            return exact_attention(rotated, tokens[1:], len(line) - length - 1, 0, None, None, scaling)
        sees = seen(line, evicted_at, length)
        scores = exact_scores(rotated, tokens.key, scaling).unflatten(1, (sees.shape[1], -1))
        scores = (scores + line.log_weight[:, :, None, None]).masked_fill(~sees.unsqueeze(2), LOG_ZERO)
        out = scores.softmax(-1) @ tokens.value.unsqueeze(2) * sees.any(-1)[:, :, None, :, None]
        return out.flatten(1, 2), scores.logsumexp(-1).flatten(1, 2)

    def enter(self, tokens: TokenBuffer) -> CodedTokens:
        """Tokens as the first tier keeps them."""
        if gpu.usable(tokens.key, tokens.value):
            from dofla.attention.gpu.encode import entered

            return CodedTokens(*entered(self.key, tokens.key), *entered(self.value, tokens.value), tokens.log_weight)
        if compiled.usable((tokens.key, tokens.value), (), DTYPES):
            return CodedTokens(*self.key.encode(tokens.key), *self.value.encode(tokens.value), tokens.log_weight)
        return self._coded_by(0, [self.key.rotate_integer(tokens.key), self.value.rotate_integer(tokens.value)], tokens)

    def aged(self, tokens: CodedTokens, tier: int) -> CodedTokens:
        """Tokens of a tier as the next one keeps them."""
        key = self.key.numbers(tokens.key, tokens.key_scale, tier)
        value = self.value.numbers(tokens.value, tokens.value_scale, tier)
        return self._coded_by(tier + 1, [key, value], tokens)

    def _coded_by(self, tier: int, vectors: list[Numbers], tokens: TokenBuffer | CodedTokens) -> CodedTokens:
        if gpu.usable(*(numbers for numbers, _ in vectors)):
            from dofla.attention.gpu.encode import age

            key, value = (age(coder, own, tier) for coder, own in zip((self.key, self.value), vectors, strict=True))
        else:
            key, value = encode_together([self.key, self.value], vectors, tier)
        return CodedTokens(*key, *value, tokens.log_weight)

    def unrotate(
        self,
        tokens: CodedTokens,
        tier: int,
        dtype: torch.dtype = torch.float32,
        unrounded: TokenBuffer | None = None,
    ) -> TokenBuffer:
        """Tokens of a tier as they were, up to quantization; with the gradients of ``unrounded``."""
        rotated = _through(self._decoded(tokens, tier, dtype), unrounded)
        return TokenBuffer(self.key.unrotate(rotated.key), self.value.unrotate(rotated.value), rotated.log_weight)

    def _unrounded(self, tokens: TokenBuffer, dtype: torch.dtype) -> TokenBuffer | None:
        """Rotated tokens, where they need gradients."""
        if not torch.is_grad_enabled() or not (tokens.key.requires_grad or tokens.value.requires_grad):
            return None
        return TokenBuffer(
            self.key.rotate(tokens.key.to(dtype)), self.value.rotate(tokens.value.to(dtype)), tokens.log_weight
        )

    def _decoded(self, tokens: CodedTokens | ScoredTokens, tier: int, dtype: torch.dtype) -> TokenBuffer:
        key = self.key.decode(tokens.key, tokens.key_scale, tier)
        value = self.value.decode(tokens.value, tokens.value_scale, tier)
        return TokenBuffer(key.to(dtype), value.to(dtype), tokens.log_weight)


def _in_front(unrounded: TokenBuffer | None, places: int) -> TokenBuffer | None:
    """Behind the ``places`` that were there before, of which nobody asks a gradient."""
    return unrounded and TokenBuffer.empty(unrounded.key, unrounded.value, places).then(unrounded)


def _through(coded: TokenBuffer, unrounded: TokenBuffer | None) -> TokenBuffer:
    """Coded tokens whose gradients are those of the unrounded ones."""
    if unrounded is None:
        return coded
    key, value = (
        own + (x - x.detach())
        for own, x in zip((coded.key, coded.value), (unrounded.key, unrounded.value), strict=True)
    )
    return replace(coded, key=key, value=value)


def tier_bytes(head_dim: int, value_dim: int, bits: float, *, scored: bool = False) -> int:
    """Bytes of a token in a tier of so many bits: a key, a value, and a score where heavy hitters are retained."""
    return token_bytes(head_dim, bits) + token_bytes(value_dim, bits) + 2 * scored
