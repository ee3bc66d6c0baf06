"""Padding in causal calls: tokens of weight 0 take no slot in a window, a tier or sinks, wherever they stand.

The arithmetic counts slots, and is right where padding comes before the first real token of a sequence. Calls with
padding elsewhere are brought into that form, or are made for the real tokens alone.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dofla.attention.state import Tensors, combined
from dofla.integration.rollback import Vectors

Answer = tuple[Tensor, Sequence[Tensors]]
Run = Callable[..., Answer]
"""A call of a layer: (query, key, value, weight=..., importance=..., states=...) → output and states."""
Tokens = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values."""
Join = Callable[[Sequence[Sequence[Tensors]]], list[Tensors]]
"""States of several sequences, each of all groups of a layer, as one of each group."""


def run_padded(
    run: Run,
    vectors: Vectors,
    states: Sequence[Tensors] | None,
    *,
    keeps_states: bool,
    in_place: bool,
    join: Join,
) -> Answer:
    """A causal call of a layer, as :meth:`dofla.layers.AttentionLayer.forward` has them, with key weights, 0 for
    padding, which may stand anywhere; ``run`` does it for padding in front, and may update states ``in_place``.

    States of several sequences become one by ``join``. Where the states after the call are not kept, some padding is
    left where it is. Padded queries of the calls that are rearranged get zeros.
    """
    query, key, value, weight, importance = vectors
    assert weight is not None
    if not states:
        if query.shape[-2] == 1:
            return run(query, key, value, weight=weight, states=None)
        return _beginning(run, (query, key, value), weight, importance, keeps_states)
    if torch.compiler.is_compiling():
        return _one_token(run, query, key, value, weight, states, in_place)
    return _continued(run, (query, key, value), weight, importance, states, join)


def _beginning(run: Run, tokens: Tokens, weight: Tensor, importance: Tensor | None, keeps_states: bool) -> Answer:
    """The call that begins sequences: padding is moved to the front. A compiled graph cannot ask where it is."""
    real = weight > 0
    if not torch.compiler.is_compiling() and not _disorder(real, keeps_states):
        return run(*tokens, weight=weight, importance=importance, states=None)
    order = real.int().argsort(dim=-1, stable=True)
    moved, importance = _taken(tokens, importance, order)
    out, after = run(*moved, weight=weight.gather(1, order), importance=importance, states=None)
    out = out.take_along_dim(order.argsort(dim=-1)[:, None, :, None], 2)
    return out.masked_fill(~real[:, None, :, None], 0), after


def _taken(tokens: Sequence[Tensor], importance: Tensor | None, places: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """Vectors and importance of the tokens at these places [B, n]."""
    moved = [x.take_along_dim(places[:, None, :, None], 2) for x in tokens]
    return moved, None if importance is None else importance.take_along_dim(places[:, None], 2)


def _disorder(real: Tensor, keeps_states: bool) -> bool:
    """True if padding [B, L] stands where it makes a difference: after a real token, and before another or the state.
    Real tokens do not see what comes after them."""
    ends = real[:, :-1] & ~real[:, 1:]
    if not keeps_states:
        begins = real[:, 1:] & ~real[:, :-1]
        ends = ends & begins.flip(1).cumsum(1).flip(1).bool()
    return bool(ends.any())


def _one_token(
    run: Run, query: Tensor, key: Tensor, value: Tensor, weight: Tensor, states: Sequence[Tensors], in_place: bool
) -> Answer:
    """The call of a compiled graph, in which each sequence gets a token or a padding token."""
    out, after = run(query, key, value, weight=weight, states=states)
    real = weight[:, 0] > 0
    if not in_place:  # kernels that update states in place let padding enter the window, where nobody sees it
        after = [_where(real, *both) for both in zip(after, states, strict=True)]
    return out.masked_fill(~real.view(-1, 1, 1, 1), 0), after


def _where(first: Tensor, one: Tensors, other: Tensors) -> Tensors:
    """Rows of ``one`` where ``first`` [B] is True and of ``other`` elsewhere."""
    return combined(lambda x, y: torch.where(first.view(-1, *[1] * (x.ndim - 1)), x, y), one, other)


def _continued(
    run: Run, tokens: Tokens, weight: Tensor, importance: Tensor | None, states: Sequence[Tensors], join: Join
) -> Answer:
    """The call that continues sequences: rows with the same number of real tokens together, those tokens alone."""
    real = weight > 0
    if real.all():
        return run(*tokens, weight=weight, importance=importance, states=states)
    query, _, value = tokens
    out = value.new_zeros(*query.shape[:-1], value.shape[-1])
    counts, rows, parts = real.sum(-1), [], []
    for count in counts.unique().tolist():
        own = (counts == count).nonzero().flatten()
        after: Sequence[Tensors] = [state.reorder(own) for state in states]
        if count:
            places = real[own].nonzero()[:, 1].view(len(own), count)
            moved, important = _taken([x[own] for x in tokens], None if importance is None else importance[own], places)
            weights = weight[own].gather(1, places)
            plain = None if (weights == 1).all() else weights
            piece, after = run(*moved, weight=plain, importance=important, states=after)
            out[own[:, None], :, places] = piece.transpose(1, 2)
        rows.append(own)
        parts.append(after)
    back = torch.cat(rows).argsort()
    return out, [state.reorder(back) for state in join(parts)]
