"""The tier of a compressed cache: older tokens in few bits, evicted by score."""

import torch
from torch import Tensor, nn

from dofla.attention.coding.coder import Coder, token_bytes
from dofla.attention.coding.operations import CodeOperations
from dofla.attention.coding.tokens import CodedTokens
from dofla.attention.constants import FREE, LOG_ZERO
from dofla.attention.state import TokenBuffer

_PIECE = 256
"""Tokens that enter at a time, so that memory does not grow with the square of a call."""


class Tier(nn.Module):
    """The tier of some KV heads of a layer, all of one size.

    Args:
        heads: KV heads.
        head_dim, value_dim: sizes of their keys and values, multiples of 8.
        newest: slots for the newest tokens, which are not evicted.
        heavy_hitters: slots beyond those, for the tokens of the highest scores
            (:mod:`dofla.attention.coding.heavy_hitters`); 0 for a tier that grows, where no token needs a score.
        bits: per number of keys and values, 1 to 5.

    Attributes:
        key, value: the coders.
        grows: whether it holds every token.
    """

    def __init__(self, heads: int, head_dim: int, value_dim: int, newest: int, heavy_hitters: int, bits: float) -> None:
        super().__init__()
        self.grows = not heavy_hitters
        self.newest = 1 if self.grows else newest
        self.key, self.value = Coder(heads, head_dim, bits), Coder(heads, value_dim, bits)

    def reset(self) -> None:
        """Reset both coders."""
        self.key.reset()
        self.value.reset()

    @torch.no_grad()
    def attend(
        self,
        query: Tensor,
        entering: TokenBuffer,
        held: CodedTokens,
        scaling: float,
        real: Tensor,
        operations: CodeOperations,
    ) -> tuple[tuple[Tensor, Tensor], CodedTokens]:
        """Attention to the tier while tokens enter it and others are evicted.

        Args:
            query: [B, H, L, d]; query i sees the tier as it is once token i has entered.
            entering: L tokens, which enter one after the other.
            held: what the tier holds before.
            scaling: of the scores.
            real: [B, L], which queries are not padding.
            operations: those of the backend.

        Returns:
            Output [B, H, L, dv] and log-normalizer [B, H, L]; and what the tier holds after.
        """
        rotated, query_integers = operations.rotate_queries(self.key, query)
        outputs, new = [], self.encode(entering, operations)
        asked = torch.zeros_like(real) if self.grows else real
        for start in range(0, len(new), _PIECE):
            part = slice(start, start + _PIECE)
            line = held.then(new[part])
            held, evicted_at = operations.select_survivors(
                self.key, query_integers(part), asked[:, part], line, self.newest, scaling
            )
            outputs.append(operations.attend(self.key, self.value, rotated[:, :, part], line, evicted_at, scaling))
        out, normalizer = (torch.cat(parts, 2) for parts in zip(*outputs, strict=True))
        return (self.value.unrotate(out), normalizer), held

    def encode(self, tokens: TokenBuffer, operations: CodeOperations) -> CodedTokens:
        """Tokens as the tier keeps them, with a score of 0, or :data:`FREE` for padding."""
        key, value = operations.encode([self.key, self.value], [tokens.key, tokens.value])
        log_weight = tokens.log_weight.unsqueeze(1).expand(key[0].shape[:3])
        return CodedTokens(*key, *value, torch.where(log_weight > LOG_ZERO, 0, FREE).to(torch.int16))


def tier_bytes(head_dim: int, value_dim: int, bits: float) -> int:
    """Bytes of a token in a tier of so many bits: a key, a value and a score."""
    return token_bytes(head_dim, bits) + token_bytes(value_dim, bits) + 2
