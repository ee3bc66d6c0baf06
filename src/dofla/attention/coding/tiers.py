"""A compressed cache: tiers of tokens between the window and the features, with ever fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor, nn

from dofla.attention.coding.coder import Coder, Numbers, token_bytes
from dofla.attention.coding.heavy_hitters import ScoredTokens, chosen, pieces
from dofla.attention.coding.operations import PLAIN, CodeOperations, decoded
from dofla.attention.coding.tokens import CodedTokens
from dofla.attention.constants import LOG_ZERO
from dofla.attention.exact import merge
from dofla.attention.state import TokenBuffer

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
        return (*tiers[:-1], ScoredTokens.of(tiers[-1])) if self.heavy_hitters else tuple(tiers)

    def _empty(self, tier: int, shape: tuple[int, ...], device: torch.device) -> CodedTokens:
        sizes = []
        for coder in (self.key, self.value):
            blocks = coder.dim // coder.block
            sizes += [coder.bytes_per_token(tier) - blocks, blocks]
        key, key_scale, value, value_scale = (
            torch.zeros(*shape, size, dtype=torch.uint8, device=device) for size in sizes
        )
        log_weight = torch.full((shape[0], shape[2]), LOG_ZERO, dtype=torch.float32, device=device)
        return CodedTokens(key, key_scale, value, value_scale, log_weight)

    def attend(
        self,
        query: Tensor,
        leaving: TokenBuffer,
        held: Sequence[CodedTokens | ScoredTokens],
        scaling: float,
        real: Tensor | None = None,
        *,
        behind: bool = True,
        operations: CodeOperations = PLAIN,
    ) -> tuple[tuple[Tensor, Tensor], tuple[CodedTokens | ScoredTokens, ...], TokenBuffer | None]:
        """Attention to the tiers while tokens move through them; gradients pass as if nothing were rounded.

        Args:
            query: [B, H, L, d]; query i sees the tiers as they are once token i has entered.
            leaving: L tokens that enter the first tier, one after the other.
            held: what the tiers hold before; nothing at the beginning of a sequence.
            scaling: of the scores.
            real: [B, L], which queries are not padding; default all.
            behind: whether the tokens that leave the last tier are needed.
            operations: those of the backend.

        Returns:
            Output [B, H, L, dv] and log-normalizer [B, H, L]; what the tiers hold after; and the L tokens that leave
            the last one, or None.
        """
        rotated, query_integers = operations.rotate_queries(self.key, query)
        length = query.shape[-2]
        with torch.no_grad():
            moving, held = self.enter(leaving, operations), held or self.empty(len(query), query.device)
        unrounded = self._unrounded(leaving, rotated.dtype)
        parts: list[tuple[Tensor, Tensor]] = []
        after: list[CodedTokens | ScoredTokens] = []
        for tier, (count, own) in enumerate(zip(self.counts, held, strict=True)):
            if isinstance(own, ScoredTokens):
                real = torch.ones_like(moving.log_weight, dtype=torch.bool) if real is None else real
                part, stays, moving, unrounded = self._attend_scored(
                    query_integers, rotated, real, own, ScoredTokens.of(moving), unrounded, scaling, operations
                )
                parts.append(part)
                after.append(stays)
                break
            line = own.then(moving)
            passing = _in_front(unrounded, count)
            parts.append(operations.attend(self.key, self.value, rotated, line, tier, None, scaling, passing))
            unrounded = passing and passing[:length]
            after.append(line[length:])
            moving = line[:length]
            if tier + 1 < len(self.counts):
                moving = self.aged(moving, tier, operations)
        out, normalizer = reduce(merge, parts)
        left = self.unrotate(moving, len(self.counts) - 1, rotated.dtype, unrounded) if behind else None
        return (self.value.unrotate(out), normalizer), tuple(after), left

    def _attend_scored(
        self,
        query_integers: Callable[[slice], Numbers],
        rotated: Tensor,
        real: Tensor,
        held: ScoredTokens,
        entering: ScoredTokens,
        unrounded: TokenBuffer | None,
        scaling: float,
        operations: CodeOperations,
    ) -> tuple[tuple[Tensor, Tensor], ScoredTokens, CodedTokens, TokenBuffer | None]:
        """The last tier, where it retains heavy hitters: as :meth:`attend`, output still rotated."""
        out, left, last = [], [], len(self.counts) - 1
        for part in pieces(len(entering)) if unrounded is None else [slice(None)]:
            line, passing = held.then(entering[part]), _in_front(unrounded, len(held))
            held, leaving, evicted_at = operations.select_survivors(
                self.key, query_integers(part), real[:, part], line, self.counts[last], scaling
            )
            queries = rotated[:, :, part]
            out.append(operations.attend(self.key, self.value, queries, line, last, evicted_at, scaling, passing))
            left.append(line.chosen(leaving))
            if passing is not None:
                unrounded = replace(passing, key=chosen(passing.key, leaving), value=chosen(passing.value, leaving))
        outputs, normalizers = zip(*out, strict=True)
        moving = reduce(ScoredTokens.then, left).plain()
        return (torch.cat(outputs, 2), torch.cat(normalizers, 2)), held, moving, unrounded

    def enter(self, tokens: TokenBuffer, operations: CodeOperations = PLAIN) -> CodedTokens:
        """Tokens as the first tier keeps them."""
        key, value = operations.encode([self.key, self.value], [tokens.key, tokens.value])
        return CodedTokens(*key, *value, tokens.log_weight)

    def aged(self, tokens: CodedTokens, tier: int, operations: CodeOperations = PLAIN) -> CodedTokens:
        """Tokens of a tier as the next one keeps them."""
        codes = [(tokens.key, tokens.key_scale), (tokens.value, tokens.value_scale)]
        key, value = operations.requantize([self.key, self.value], codes, tier)
        return CodedTokens(*key, *value, tokens.log_weight)

    def unrotate(
        self,
        tokens: CodedTokens | ScoredTokens,
        tier: int,
        dtype: torch.dtype = torch.float32,
        unrounded: TokenBuffer | None = None,
    ) -> TokenBuffer:
        """Tokens of a tier as they were, up to quantization; with the gradients of ``unrounded``."""
        rotated = decoded(self.key, self.value, tokens, tier, dtype, unrounded)
        return TokenBuffer(self.key.unrotate(rotated.key), self.value.unrotate(rotated.value), rotated.log_weight)

    def _unrounded(self, tokens: TokenBuffer, dtype: torch.dtype) -> TokenBuffer | None:
        """Rotated tokens, where they need gradients."""
        if not torch.is_grad_enabled() or not (tokens.key.requires_grad or tokens.value.requires_grad):
            return None
        return TokenBuffer(
            self.key.rotate(tokens.key.to(dtype)), self.value.rotate(tokens.value.to(dtype)), tokens.log_weight
        )


def _in_front(unrounded: TokenBuffer | None, places: int) -> TokenBuffer | None:
    """Behind the ``places`` that were there before, of which nobody asks a gradient."""
    return unrounded and TokenBuffer.empty(unrounded.key, unrounded.value, places).then(unrounded)


def tier_bytes(head_dim: int, value_dim: int, bits: float, *, scored: bool = False) -> int:
    """Bytes of a token in a tier of so many bits: a key, a value, and a score where heavy hitters are retained."""
    return token_bytes(head_dim, bits) + token_bytes(value_dim, bits) + 2 * scored
