"""A memory that fades, from one call to the next as it is kept: window and sinks in eight bits, stages in codes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dofla.attention import compiled
from dofla.attention.attend import _select, _tokens, _write
from dofla.attention.backends import Features, causal_attention
from dofla.attention.coding import Fading
from dofla.attention.compiled.fading import DTYPES, fading_step
from dofla.attention.state import State


def attend_faded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: Features,
    fading: Fading,
    *,
    scaling: float,
    weight: Tensor | None,
    state: State | None,
    heads: Sequence[int] | None,
    out: Tensor | None,
) -> tuple[Tensor, State] | None:
    """What :func:`dofla.attention.attend` makes of tokens that are kept in eight bits, by the compiled kernels.

    Args and returns are those of :func:`dofla.attention.attend`, but that ``state`` is as it is kept
    (:func:`dofla.attention.packed`), before and after. None if the kernels do not do such a call.
    """
    if state is None or state.window is None or query.shape[-2] > 1:
        return None
    if not compiled.usable((query, key, value), (state.stages[0].key, fading.key.turn), DTYPES):
        return None
    log_weight = None if weight is None else _tokens(key[..., :0], value[..., :0], weight).log_weight
    found = fading_step(query, key, value, log_weight, state, fading, scaling, heads, features.features > 0)
    if found is None:
        return None
    piece, normaliser, left, after = found
    groups = query.shape[1] // key.shape[1]
    query_heads = None if heads is None else [head * groups + n for head in heads for n in range(groups)]
    if left is not None:
        queries = _select(query, query_heads)
        piece, far = causal_attention(
            queries, left, features, scaling=scaling, state=state.features, near=(piece, normaliser)
        )
        after = State(far, after.window, after.sinks, after.stages)
    return _write(piece.to(value.dtype), out, query_heads), after
