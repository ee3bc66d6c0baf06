"""A memory that fades, by the kernels: fading.h is coding/fading.py and eight_bits.py, codes bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dofla.attention.coding import Fading
from dofla.attention.coding.kept import WEIGHTS
from dofla.attention.coding.levels import tables
from dofla.attention.flat import Layout

DTYPES = (torch.float32, torch.bfloat16)
"""Of the vectors that the kernels take."""
TABLES = torch.cat([tables(), WEIGHTS])
"""All that is looked up."""


def attend_and_code(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_weight: Tensor | None,
    state: Tensor,
    fading: Fading,
    layout: Layout,
    scaling: float,
    heads: Sequence[int] | None,
) -> list[Tensor]:
    """Causal attention of new tokens to themselves and to what a fading memory holds, and the memory after them.

    Args:
        query: [B, H, L, d], of all heads.
        key: [B, Hkv, L, d].
        value: [B, Hkv, L, dv].
        log_weight: [B, L], or None for none.
        state: [B, bytes], window, sinks and stages before.
        fading: the stages of the group.
        layout: of ``state``.
        scaling: of the scores.
        heads: the KV heads of the group; None for all.

    Returns:
        Output [B, H', L, dv] for the queries of the group's heads, and the state after [B, bytes]. If features stand
        behind the stages, the output is float32, and the log-normaliser [B, H', L] follows, and of the L tokens that
        leave the last stage the keys, the values and the log-weights. A vector that holds NaN or infinity, which codes
        cannot keep, is kept as zeros, and the output is NaN: of a query its own row, of a key or a value those of its
        head from its token on.
    """
    return torch.ops.dofla.fading(
        query,
        key,
        value,
        log_weight,
        state,
        fading.key.constants,
        fading.value.constants,
        TABLES,
        scaling,
        heads or (),
        layout.features > 0,
        layout.window,
        layout.sinks,
        fading.counts,
        fading.kept,
    )
