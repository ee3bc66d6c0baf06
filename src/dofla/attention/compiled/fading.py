"""A memory that fades, by the kernels: fading.h is coding/fading.py and eight_bits.py, codes bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from dofla.attention.coding import Fading
from dofla.attention.coding.kept import WEIGHTS
from dofla.attention.coding.levels import tables
from dofla.attention.eight_bits import PackedTokens
from dofla.attention.state import State, TokenBuffer, _Tensors

DTYPES = (torch.float32, torch.bfloat16)
"""Of the vectors that the kernels take."""


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
) -> tuple[Tensor, Tensor | None, TokenBuffer | None, State] | None:
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
        features those before. None if the vectors hold NaN or infinity, which codes cannot keep.
    """
    coded, kept = [part for tokens in state.stages for part in _parts(tokens)], []
    if fading.kept:
        kept = [*fading.key.asking_by, WEIGHTS, coded.pop()]
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
        tables(),
        scaling,
        heads or (),
        behind,
        kept,
        fading.counts[-1],
    )
    if not found:
        return None
    out, normaliser, left, found = found[0], None, None, found[1:]
    if behind:
        normaliser, left, found = found[0], TokenBuffer(*found[1:4]), found[4:]
    found = iter(found)
    window = PackedTokens(*islice(found, 5))
    stages = tuple(type(tokens)(*islice(found, len(_parts(tokens)))) for tokens in state.stages)
    later = tuple(found)
    sinks = PackedTokens(*later) if later else state.sinks
    return out, normaliser, left, State(state.features, window, sinks, stages)


def _parts(tokens: _Tensors) -> list[Tensor]:
    """The tensors of packed or coded tokens, in the order of their fields."""
    return list(vars(tokens).values())
