"""The state of a compressed cache: one row of bytes for each sequence, which holds the tokens of all KV heads of a
layer.

What stands in a row is declared here, once. C++ reads it as ``layout.h``, which :func:`layout_header` writes, and the
Triton kernels by the names of :data:`HEAD_NUMBERS`. As separate tensors, a state would be fifteen for each group of
heads, and passing so many costs a decoded token half as much again as the arithmetic. Plain torch works on views.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from dofla.attention.coding.coder import block_size, token_bytes
from dofla.attention.coding.tokens import CodedTokens
from dofla.attention.constants import ALIGNMENT, FREE, LOG_ZERO
from dofla.attention.eight_bits import PackedTokens, pack
from dofla.attention.state import Tensors

_Kind = TypeVar("_Kind", PackedTokens, CodedTokens)


class HeadSizes(NamedTuple):
    """Tokens that the cache of a KV head holds.

    Attributes:
        window: local window: the last ones, in int8.
        sinks: attention sinks: the first ones, in int8.
        newest: of the tier, those that are not evicted as they are the newest.
        heavy_hitters: of the tier, those of the highest scores.
    """

    window: int
    sinks: int
    newest: int
    heavy_hitters: int


class Group(NamedTuple):
    """KV heads of one size, in numbers as kernels read them.

    Attributes:
        kv_heads: how many.
        window, sinks, newest: tokens, as in :class:`HeadSizes`.
        slots: of the tier.
        key_dim, value_dim: numbers of a key and of a value.
        key_bytes, value_bytes: bytes of their codes.
        key_blocks, value_blocks: bytes of their scales.
        window_key to tier_score: where these parts (:data:`PARTS`) begin in a row.
    """

    kv_heads: int
    window: int
    sinks: int
    newest: int
    slots: int
    key_dim: int
    key_bytes: int
    key_blocks: int
    value_dim: int
    value_bytes: int
    value_blocks: int
    window_key: int = 0
    window_key_exponent: int = 0
    window_value: int = 0
    window_value_exponent: int = 0
    window_log_weight: int = 0
    sink_key: int = 0
    sink_key_exponent: int = 0
    sink_value: int = 0
    sink_value_exponent: int = 0
    sink_log_weight: int = 0
    tier_key: int = 0
    tier_key_scale: int = 0
    tier_value: int = 0
    tier_value_scale: int = 0
    tier_score: int = 0


class Part(NamedTuple):
    """A tensor in a row: [kv_heads, tokens, numbers] of a type, [kv_heads, tokens] without ``numbers``; [tokens] of
    what the heads share. ``tokens`` and ``numbers`` name fields of :class:`Group`."""

    dtype: torch.dtype
    tokens: str
    numbers: str | None = None
    shared: bool = False

    def shape(self, group: Group) -> tuple[int, ...]:
        """Its shape in a group."""
        heads = () if self.shared else (group.kv_heads,)
        return (*heads, getattr(group, self.tokens), *([getattr(group, self.numbers)] if self.numbers else []))

    def head_bytes(self, group: Group) -> int:
        """The bytes of one head; 0 of what the heads share."""
        return 0 if self.shared else math.prod(self.shape(group)[1:]) * self.dtype.itemsize


def _eight_bits(name: str, tokens: str) -> dict[str, Part]:
    return {
        f"{name}_key": Part(torch.int8, tokens, "key_dim"),
        f"{name}_key_exponent": Part(torch.int8, tokens),
        f"{name}_value": Part(torch.int8, tokens, "value_dim"),
        f"{name}_value_exponent": Part(torch.int8, tokens),
        f"{name}_log_weight": Part(torch.float32, tokens, shared=True),
    }


PARTS: dict[str, Part] = {
    **_eight_bits("window", "window"),
    **_eight_bits("sink", "sinks"),
    "tier_key": Part(torch.uint8, "slots", "key_bytes"),
    "tier_key_scale": Part(torch.uint8, "slots", "key_blocks"),
    "tier_value": Part(torch.uint8, "slots", "value_bytes"),
    "tier_value_scale": Part(torch.uint8, "slots", "value_blocks"),
    "tier_score": Part(torch.int16, "slots"),
}
"""The parts of a group, in the order of a row; each begins at a multiple of :data:`ALIGNMENT` bytes. Those of window
and sinks are the fields of :class:`PackedTokens`, those of the tier the fields of :class:`CodedTokens`."""

HEAD_NUMBERS = (*PARTS, "slots", "head", "first")
"""The numbers that describe one KV head: where its parts begin in a row; slots of its tier; its index in the layer; and
1 for the first head of its group, which writes what the heads of a group share."""


@dataclass(frozen=True)
class CompressedState(Tensors):
    """The state of all KV heads of a layer: ``rows`` [B, bytes], uint8, which a :class:`Layout` reads."""

    rows: Tensor


@dataclass(frozen=True)
class Contents:
    """The tokens of one group of heads, as views of a state or made anew."""

    window: PackedTokens
    sinks: PackedTokens | None
    tier: CodedTokens


class Layout:
    """Where the tokens of a layer's KV heads stand in a row of bytes, group by group.

    Args:
        sizes: of each KV head; heads of one size are a group.
        key_dim, value_dim: numbers of a key and of a value, multiples of 8.
        bits: of the tier, per number.

    Attributes:
        sizes: of each group.
        heads: the KV heads of each group.
        groups: their numbers.
        bytes: of a row.
    """

    def __init__(self, sizes: Sequence[HeadSizes], key_dim: int, value_dim: int, bits: float) -> None:
        self.sizes = list(dict.fromkeys(sizes))
        self.heads = [[head for head, own in enumerate(sizes) if own == size] for size in self.sizes]
        self.groups: list[Group] = []
        self.bytes = 0
        for size, heads in zip(self.sizes, self.heads, strict=True):
            slots, dims = size.newest + size.heavy_hitters, []
            for dim in (key_dim, value_dim):
                blocks = dim // block_size(dim)
                dims += [dim, token_bytes(dim, bits) - blocks, blocks]
            group, starts = Group(len(heads), size.window, size.sinks, size.newest, slots, *dims), {}
            for name, part in PARTS.items():
                starts[name] = self.bytes
                count = math.prod(part.shape(group)) * part.dtype.itemsize
                self.bytes += -(-count // ALIGNMENT) * ALIGNMENT
            self.groups.append(group._replace(**starts))
        self.order = [head for heads in self.heads for head in heads]
        self.numbers = [number for group in self.groups for number in group]
        self._before = self._empty_row()  # to make it takes as long as to read fifty tokens

    def empty(self, batch: int, device: torch.device) -> CompressedState:
        """The state before the first token."""
        return CompressedState(self._before.to(device).repeat(batch, 1))

    def _empty_row(self) -> Tensor:
        row = torch.zeros(1, self.bytes, dtype=torch.uint8, device="cpu")
        exponent = int(pack(torch.zeros(1, 1, device="cpu"))[1])
        for group in self.groups:
            for name in PARTS:
                if name.endswith("_exponent"):
                    self._part(row, group, name).fill_(exponent)
                elif name.endswith(("_log_weight", "_score")):
                    self._part(row, group, name).fill_(LOG_ZERO if name.endswith("_log_weight") else FREE)
        return row

    def open(self, state: CompressedState) -> list[Contents]:
        """The tokens of each group: views."""
        return [
            Contents(
                self._tokens(PackedTokens, state.rows, group, "window"),
                self._tokens(PackedTokens, state.rows, group, "sink") if group.sinks else None,
                self._tokens(CodedTokens, state.rows, group, "tier"),
            )
            for group in self.groups
        ]

    def close(self, contents: Sequence[Contents]) -> CompressedState:
        """The reverse of :meth:`open`: a state of its own memory, whose bytes between parts are zeros. One operation
        joins all, since a GPU takes as long for each of many copies."""
        first, pieces = contents[0].tier.score, []
        zeros = torch.zeros(len(first), ALIGNMENT, dtype=torch.uint8, device=first.device)
        for own in contents:
            for tokens in (own.window, own.sinks, own.tier):
                for part in vars(tokens).values() if tokens is not None else ():
                    piece = part.reshape(len(first), -1).view(torch.uint8)
                    pieces += [piece, zeros[:, : -piece.shape[1] % ALIGNMENT]]
        return CompressedState(torch.cat(pieces, 1))

    def head_numbers(self) -> list[list[int]]:
        """:data:`HEAD_NUMBERS` of each KV head, group by group."""
        found = []
        for group, heads in zip(self.groups, self.heads, strict=True):
            for n, head in enumerate(heads):
                starts = [getattr(group, name) + n * part.head_bytes(group) for name, part in PARTS.items()]
                found.append([*starts, group.slots, head, int(n == 0)])
        return found

    @staticmethod
    def _part(rows: Tensor, group: Group, name: str) -> Tensor:
        part, start = PARTS[name], getattr(group, name)
        shape = part.shape(group)
        return rows[:, start : start + math.prod(shape) * part.dtype.itemsize].view(part.dtype).unflatten(-1, shape)

    def _tokens(self, kind: type[_Kind], rows: Tensor, group: Group, name: str) -> _Kind:
        parts = (x for x in PARTS if x.startswith(f"{name}_"))
        return kind(*(self._part(rows, group, part) for part in parts))


def layout_header() -> str:
    """``layout.h``: :class:`Group` as a struct of C++."""
    return (
        "#pragma once\n\n#include <cstdint>\n\nnamespace dofla {\n"
        f"struct GroupNumbers {{\n  std::int64_t {', '.join(Group._fields)};\n}};\n"
        f"constexpr std::int64_t kGroupNumbers = {len(Group._fields)};\n}}\n"
    )
