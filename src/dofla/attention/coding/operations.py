"""Operations on the codes of a compressed cache, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dofla.attention.coding.coder import Coder, Numbers, encode_together
from dofla.attention.coding.heavy_hitters import ScoredTokens, seen, select_survivors
from dofla.attention.coding.tokens import CodedTokens
from dofla.attention.constants import LOG_ZERO
from dofla.attention.eight_bits import pack
from dofla.attention.exact import exact_attention
from dofla.attention.kernel import exact_scores
from dofla.attention.state import TokenBuffer, accumulable

Coded = tuple[Tensor, Tensor]
"""Codes [B, Hkv, L, bytes] and scales [B, Hkv, L, blocks] of vectors, uint8."""


class CodeOperations:
    """Operations on codes. A backend overrides what it has kernels for, with the same results bit for bit but for
    the sums of attention."""

    def pack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """:func:`dofla.attention.eight_bits.pack`."""
        return pack(x)

    def encode(self, coders: Sequence[Coder], vectors: Sequence[Tensor]) -> list[Coded]:
        """Vectors [B, Hkv, L, d] as the first tier keeps them, for each coder."""
        return encode_together(coders, [own.rotate_integer(x) for own, x in zip(coders, vectors, strict=True)], 0)

    def requantize(self, coders: Sequence[Coder], codes: Sequence[Coded], tier: int) -> list[Coded]:
        """Codes of a tier as the tier after it keeps them, for each coder."""
        numbers = [coder.numbers(*own, tier) for coder, own in zip(coders, codes, strict=True)]
        return encode_together(coders, numbers, tier + 1)

    def unrotated(self, coder: Coder, codes: Coded, tier: int) -> Tensor:
        """Vectors [B, Hkv, L, d], float32, as they were before rotation, up to quantization, of codes of a tier."""
        return coder.unrotate(coder.decode(*codes, tier))

    def chain(self, coder: Coder, x: Tensor) -> list[Tensor]:
        """Vectors [B, Hkv, L, d] as they come back from each tier."""
        (codes,), found = self.encode([coder], [x]), []
        for tier in range(len(coder.tiers)):
            found.append(self.unrotated(coder, codes, tier))
            if tier + 1 < len(coder.tiers):
                (codes,) = self.requantize([coder], [codes], tier)
        return found

    def rotate_queries(self, coder: Coder, query: Tensor) -> tuple[Tensor, Callable[[slice], Numbers]]:
        """Queries [B, H, L, d] rotated to the codes of keys [B, H, L, d + 1], where the last number is their product
        with the mean of the keys; and what gives those of some tokens as integers, as :meth:`select_survivors` takes
        them."""
        rotated, beside = coder.rotate_query(accumulable(query))
        return (
            torch.cat([rotated, beside.unsqueeze(-1)], -1),
            lambda part: coder.rotate_query_integer(query[:, :, part].detach()),
        )

    def attend(
        self,
        key: Coder,
        value: Coder,
        rotated: Tensor,
        line: CodedTokens | ScoredTokens,
        tier: int,
        evicted_at: Tensor | None,
        scaling: float,
        unrounded: TokenBuffer | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of L queries to a tier, of whose tokens the last L enter with one query each.

        Args:
            key, value: coders.
            rotated: queries [B, H, L, d + 1], as :meth:`rotate_queries` gives them.
            line: what the tier held, and the L tokens that enter: S tokens.
            tier: which.
            evicted_at: [B, Hkv, S], the first query that sees a token no more; None where the first that came is the
                first to go.
            scaling: of the scores.
            unrounded: the rotated tokens of the line whose gradients those of the codes are, if any are needed.

        Returns:
            Output [B, H, L, dv], rotated like the values, and log-normalizer [B, H, L].
        """
        length = rotated.shape[-2]
        tokens = decoded(key, value, line, tier, rotated.dtype, unrounded)
        tokens = replace(tokens, key=F.pad(tokens.key, (0, 1), value=1.0))
        if evicted_at is None or isinstance(line, CodedTokens):
            return exact_attention(rotated, tokens[1:], len(line) - length - 1, 0, None, None, scaling)
        sees = seen(line, evicted_at, length)
        scores = exact_scores(rotated, tokens.key, scaling).unflatten(1, (sees.shape[1], -1))
        scores = (scores + line.log_weight[:, :, None, None]).masked_fill(~sees.unsqueeze(2), LOG_ZERO)
        out = scores.softmax(-1) @ tokens.value.unsqueeze(2) * sees.any(-1)[:, :, None, :, None]
        return out.flatten(1, 2), scores.logsumexp(-1).flatten(1, 2)

    def select_survivors(
        self, coder: Coder, query_integers: Numbers, real: Tensor, line: ScoredTokens, newest: int, scaling: float
    ) -> tuple[ScoredTokens, Tensor, Tensor]:
        """:func:`dofla.attention.coding.heavy_hitters.select_survivors`."""
        return select_survivors(query_integers, real, line, newest, coder, scaling)


PLAIN = CodeOperations()


def decoded(
    key: Coder,
    value: Coder,
    tokens: CodedTokens | ScoredTokens,
    tier: int,
    dtype: torch.dtype,
    unrounded: TokenBuffer | None = None,
) -> TokenBuffer:
    """Rotated tokens of codes of a tier, with the gradients of ``unrounded`` ones."""
    k = key.decode(tokens.key, tokens.key_scale, tier).to(dtype)
    v = value.decode(tokens.value, tokens.value_scale, tier).to(dtype)
    if unrounded is not None:
        k, v = (own + (x - x.detach()) for own, x in zip((k, v), (unrounded.key, unrounded.value), strict=True))
    return TokenBuffer(k, v, tokens.log_weight)
