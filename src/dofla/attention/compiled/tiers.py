"""A compressed cache, by the kernels: tiers.h is coding/tiers.py and eight_bits.py, codes bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from dofla.attention.eight_bits import pack


def attend_and_code(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_weight: Tensor | None,
    states: list[Tensor],
    keys: list[Tensor],
    values: list[Tensor],
    tables: Tensor,
    sizes: list[int],
    scaling: float,
) -> list[Tensor]:
    """Causal attention of new tokens to themselves and to what compressed caches hold, and the memories after them.

    Args:
        query: [B, H, L, d].
        key: [B, Hkv, L, d].
        value: [B, Hkv, L, dv].
        log_weight: [B, L], or None for none.
        states: of each group of heads, [B, bytes], window, sinks and tiers before.
        keys, values: of each group, the constants of its coders.
        tables: all that is looked up (:data:`dofla.attention.coding.levels.TABLES`).
        sizes: those of the groups' layouts (:attr:`dofla.attention.Layout.sizes`), one after the other.
        scaling: of the scores.

    Returns:
        Output [B, H, L, dv], zeros of heads in no group; the states after; and of each group that has features behind
        its tiers the log-normalizer [B, H', L] of its heads' output, and of the L tokens that leave the last tier the
        keys, the values and the log-weights. If there are any, the output is float32. A vector that holds NaN or
        infinity, which codes cannot keep, is kept as zeros, and the output is NaN: of a query its own row, of a key or
        a value those of its head from its token on.
    """
    return torch.ops.dofla.attend_and_code.default(
        query, key, value, log_weight, states, keys, values, tables, scaling, sizes
    )


def attend_and_code_in_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pools: list[Tensor],
    pages: Tensor,
    starts: list[int],
    keys: list[Tensor],
    values: list[Tensor],
    tables: Tensor,
    sizes: list[int],
    scaling: float,
) -> Tensor:
    """:func:`attend_and_code` of n sequences of different lengths, whose states are pages of pools, and are updated
    there.

    Args:
        query: of all sequences, one after the other, [1, H, L, d].
        key, value: likewise, [1, Hkv, L, d] and [1, Hkv, L, dv].
        pools: of each group of heads, which has no features, [P, bytes].
        pages: of each sequence [n], int64.
        starts: where each sequence begins among the tokens, and their number, [n + 1].
        keys, values, tables, sizes, scaling: as :func:`attend_and_code` takes them.

    Returns:
        Output [1, H, L, dv].
    """
    return torch.ops.dofla.attend_and_code_in_pages.default(
        query, key, value, pools, pages, starts, keys, values, tables, scaling, sizes
    )


def encode(x: Tensor, constants: Tensor, tables: Tensor, tiers: int) -> tuple[Tensor, Tensor]:
    """Codes [B, Hkv, L, bytes] and scales [B, Hkv, L, blocks], uint8, of vectors [B, Hkv, L, d] in the first tier:
    :meth:`dofla.attention.Coder.encode`."""
    integers, exponents = pack(x)
    return torch.ops.dofla.encode.default(integers.contiguous(), exponents.contiguous(), constants, tables, tiers)
