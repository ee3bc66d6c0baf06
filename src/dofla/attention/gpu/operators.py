"""A decoded token of all groups of a layer; as an operator of torch, so that torch.compile takes it into its graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dofla.attention.coding.heavy_hitters import weight_steps
from dofla.attention.flat import Layout

if TYPE_CHECKING:
    from dofla.attention.gpu.token import Decoder

_DECODERS: WeakKeyDictionary[Layout, list[tuple[list[int], Decoder]]] = WeakKeyDictionary()


def decoders_of(layouts: Sequence[Layout]) -> list[tuple[list[int], Decoder]]:
    """The decoders of a layer, each with the places of its groups; made once, since a decoded token is little else than
    what is looked up here."""
    if layouts[0] not in _DECODERS:
        from dofla.attention.gpu.token import Decoder, alike

        places: dict[object, list[int]] = {}
        for n, layout in enumerate(layouts):
            places.setdefault(alike(layout), []).append(n)
        _DECODERS[layouts[0]] = [(own, Decoder([layouts[n] for n in own])) for own in places.values()]
    return _DECODERS[layouts[0]]


@torch.compiler.assume_constant_result
def prepare(layouts: list[int], scaling: float, device: torch.device) -> None:
    """Make what :func:`decode_token` looks up while a graph is traced. A tensor that is made while a CUDA graph is
    recorded lies in memory of the graph.

    Args:
        layouts: their ids (:meth:`Layout.register`).
        scaling: of the scores.
        device: of the queries.
    """
    weight_steps(scaling, device)
    for _, decoder in decoders_of([Layout.registered[place] for place in layouts]):
        decoder.constants(device)


def update_constants() -> None:
    """Take constants of coders that were written or loaded since the last token: CUDA graphs do not ask for them."""
    for decoders in _DECODERS.values():
        for _, decoder in decoders:
            decoder.coders()


def decode(
    layouts: Sequence[Layout],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_weight: Tensor | None,
    states: Sequence[Tensor],
    scaling: float,
    in_place: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Attention of one token: :meth:`dofla.attention.backend.Backend.read_packed` of layouts that retain tokens.

    States that are parts of common rows are updated there, if they may be; others are copied into such rows.

    Returns:
        Output [B, H, 1, dv], and the states after.
    """
    from dofla.attention.gpu.side_by_side import common_rows

    out, after, steps = empty_output(layouts, query, key, value), list(states), weight_steps(scaling, query.device)
    for places, decoder in decoders_of(layouts):
        own = [states[n] for n in places]
        rows = common_rows(own) if in_place else None
        if rows is None:
            rows = torch.cat(own, 1)
        decoder(query, key, value, log_weight, rows, out, scaling, *steps)
        for n, state in zip(places, rows.split(decoder.bytes, 1), strict=True):
            after[n] = state
    return out, after


def empty_output(layouts: Sequence[Layout], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Output [B, H, L, dv] to be filled; zeros if there are heads in no group."""
    all_heads = sum(len(layout.heads) for layout in layouts) == key.shape[1]
    return (value.new_empty if all_heads else value.new_zeros)(*query.shape[:-1], value.shape[-1])


@torch.library.custom_op(
    "dofla::decode_token",
    mutates_args=("states",),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? log_weight, Tensor(a!)[] states, int[] layouts, "
    "float scaling) -> Tensor",
)
def decode_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_weight: Tensor | None,
    states: list[Tensor],
    layouts: list[int],
    scaling: float,
) -> Tensor:
    """:func:`decode` in place, for graphs, which hold no layouts but their ids (:meth:`Layout.register`)."""
    own = [Layout.registered[place] for place in layouts]
    out, after = decode(own, query, key, value, log_weight, states, scaling, in_place=True)
    for state, new in zip(states, after, strict=True):
        if new.data_ptr() != state.data_ptr():  # they were no parts of common rows
            state.copy_(new)
    return out


@decode_token.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
    return value.new_empty(*query.shape[:-1], value.shape[-1])
