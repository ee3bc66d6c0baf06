"""A decoded token of all groups of a layer; as an operator of torch, so that torch.compile takes it into its graph."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dofla.attention.backend import REGISTERED, Compressed
from dofla.attention.call import Call
from dofla.attention.coding.heavy_hitters import weight_steps
from dofla.attention.layout import Layout

if TYPE_CHECKING:
    from dofla.attention.gpu.token import Decoder

_DECODERS: WeakKeyDictionary[Layout, list[Decoder]] = WeakKeyDictionary()


def decoders_of(heads: Compressed, layout: Layout) -> list[Decoder]:
    """The decoders of a layer, one for the groups with one local window; made once for each layout, since a decoded
    token is little else than what is looked up here."""
    if layout not in _DECODERS:
        from dofla.attention.gpu.token import Decoder, alike

        groups: dict[object, list[int]] = {}
        for n, group in enumerate(layout.groups):
            groups.setdefault(alike(group), []).append(n)
        _DECODERS[layout] = [Decoder(heads, layout, own) for own in groups.values()]
    return _DECODERS[layout]


@torch.compiler.assume_constant_result
def prepare(known: int, scaling: float, device: torch.device, count: int) -> None:
    """Make what :func:`decode_token` looks up, for heads by their id and states of so many bytes, while a graph is
    traced. A tensor that is made while a CUDA graph is recorded lies in memory of the graph."""
    weight_steps(scaling, device)
    heads = REGISTERED[known]
    for decoder in decoders_of(heads, heads.layouts.of(count)):
        decoder.constants(device)


def update_constants() -> None:
    """Take constants of coders that were written or loaded since the last token: CUDA graphs do not ask for them."""
    for decoders in _DECODERS.values():
        for decoder in decoders:
            decoder.coders()


def decode(heads: Compressed, call: Call, rows: Tensor, pages: Tensor | None = None) -> Tensor:
    """Attention of one token of each sequence [B, H, 1, dv]. The states, which are updated in place, are rows
    [B, bytes]; or the sequences' ``pages`` [B] of a pool of such rows."""
    out = call.new_output()
    for decoder in decoders_of(heads, heads.layouts.of(rows.shape[-1])):
        decoder(call, rows, out, pages)
    return out


@torch.library.custom_op(
    "dofla::decode_token",
    mutates_args=("rows",),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? log_weight, Tensor(a!) rows, int known, float scaling)"
    " -> Tensor",
)
def decode_token(
    query: Tensor, key: Tensor, value: Tensor, log_weight: Tensor | None, rows: Tensor, known: int, scaling: float
) -> Tensor:
    """:func:`decode` for graphs, which hold no heads but their id (:meth:`.Compressed.register`)."""
    return decode(REGISTERED[known], Call(query, key, value, scaling, log_weight), rows)


@decode_token.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
    return value.new_empty(*query.shape[:-1], value.shape[-1])
