"""A memory that fades, by the kernels: fading.h is coding/fading.py and eight_bits.py, codes bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dofla.attention.coding import Fading
from dofla.attention.coding.kept import WEIGHTS
from dofla.attention.coding.levels import tables
from dofla.attention.eight_bits import PackedTokens
from dofla.attention.state import State, TokenBuffer, _Tensors

DTYPES = (torch.float32, torch.bfloat16)
"""Of the vectors that the kernels take."""
TABLES = torch.cat([tables(), WEIGHTS])
"""All that is looked up."""


def attend_and_code(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_weight: Tensor | None,
    state: State,
    fading: Fading,
    scaling: float,
    heads: Sequence[int] | None,
    behind: bool,
) -> tuple[Tensor, Tensor | None, TokenBuffer | None, State]:
    """Causal attention of new tokens to themselves and to what a fading memory holds, and the memory after them.

    Args:
        query: [B, H, L, d], of all heads.
        key: [B, Hkv, L, d].
        value: [B, Hkv, L, dv].
        log_weight: [B, L], or None for none.
        state: with window, sinks (if any) and stages as they are kept.
        fading: the stages of the group.
        scaling: of the scores.
        heads: the KV heads of the group; None for all.
        behind: whether features stand behind the stages.

    Returns:
        Output [B, H', L, dv] for the queries of the group's heads; for features ``behind`` the log-normaliser
        [B, H', L], the output then being float32, and the L tokens that leave the last stage; and the state after, its
        features those before. A vector that holds NaN or infinity, which codes cannot keep, is kept as zeros, and the
        output is NaN: of a query its own row, of a key or a value those of its head from its token on.
    """
    coded = [part for tokens in state.stages for part in _parts(tokens)]
    score = coded.pop() if fading.kept else None
    coders = fading.key.constants + fading.value.constants
    sinks = _parts(state.sinks) if state.sinks is not None else []
    found = torch.ops.dofla.fading(
        query,
        key,
        value,
        log_weight,
        _parts(state.window),
        sinks,
        coded,
        coders,
        TABLES,
        scaling,
        heads or (),
        behind,
        score,
        fading.counts[-1],
    )
    out, normaliser, left, found = found[0], None, None, found[1:]
    if behind:
        normaliser, left, found = found[0], TokenBuffer(*found[1:4]), found[4:]
    window, found = PackedTokens(*found[:5]), found[5:]
    stages = []
    for tokens in state.stages:
        parts = len(_parts(tokens))
        stages.append(type(tokens)(*found[:parts]))
        found = found[parts:]
    sinks = PackedTokens(*found) if found else None
    return out, normaliser, left, State(state.features, window, sinks, tuple(stages))


def _parts(tokens: _Tensors) -> list[Tensor]:
    """The tensors of packed or coded tokens, in the order of their fields."""
    return list(vars(tokens).values())
