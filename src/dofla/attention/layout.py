"""The state of a compressed cache: a row of bytes for each sequence, with the tokens of all KV heads of a layer.

What stands in a row is declared here, once. C++ reads it as ``layout.h``, which :func:`layout_header` writes, and the
Triton kernels by the names of :data:`HEAD_NUMBERS`. As separate tensors, a state would be fifteen for each group of
heads, and passing so many costs a decoded token half as much again as the arithmetic. Plain torch works on views.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from dofla.attention.coding.coder import block_size, token_bytes
from dofla.attention.coding.tokens import CodedTokens
from dofla.attention.constants import FREE, LOG_ZERO
from dofla.attention.eight_bits import PackedTokens, pack
from dofla.attention.rows import Rows
from dofla.attention.state import Tensors

_T = TypeVar("_T")
LEAST_SLOTS = 64
"""The least slots of a tier that grows, and the least that it gets more: so states of other slots have other bytes."""


class HeadSizes(NamedTuple):
    """Tokens that the cache of a KV head holds.

    Attributes:
        window: local window: the last ones, in int8.
        sinks: attention sinks: the first ones, in int8.
        newest: of the tier, those that are not evicted as they are the newest.
        heavy_hitters: of the tier, those of the highest scores; 0 where no token is evicted and the tier grows.
    """

    window: int
    sinks: int
    newest: int
    heavy_hitters: int

    @property
    def grows(self) -> bool:
        """True if the head holds every token."""
        return not self.heavy_hitters


class Group(NamedTuple):
    """KV heads of one size, in numbers as kernels read them."""

    kv_heads: int  # how many
    window: int  # tokens, as in HeadSizes
    sinks: int
    newest: int
    slots: int  # of the tier
    grows: int  # 1 if no token is evicted, and so none has a score
    key_dim: int  # numbers of a key
    key_bytes: int  # of its codes
    key_blocks: int  # bytes of its scales
    value_dim: int
    value_bytes: int
    value_blocks: int
    starts: tuple[int, ...] = ()  # where the PARTS begin in a row


class Part(NamedTuple):
    """A tensor in a row: [kv_heads, tokens, numbers] of a type, [kv_heads, tokens] without ``numbers``; [tokens] of
    what heads share. ``tokens`` and ``numbers`` name fields of :class:`Group`; ``free`` stands in free places."""

    dtype: torch.dtype
    tokens: str
    numbers: str | None = None
    shared: bool = False
    free: float = 0

    def shape(self, group: Group) -> tuple[int, ...]:
        """Its shape in a group."""
        heads = () if self.shared else (group.kv_heads,)
        return (*heads, getattr(group, self.tokens), *([getattr(group, self.numbers)] if self.numbers else []))

    def head_bytes(self, group: Group) -> int:
        """The bytes of one head; 0 of what the heads share."""
        return 0 if self.shared else math.prod(self.shape(group)[1:]) * self.dtype.itemsize


def _eight_bits(name: str, tokens: str) -> dict[str, Part]:
    of_zeros = int(pack(torch.zeros(1, 1, device="cpu"))[1])
    return {
        f"{name}_key": Part(torch.int8, tokens, "key_dim"),
        f"{name}_key_exponent": Part(torch.int8, tokens, free=of_zeros),
        f"{name}_value": Part(torch.int8, tokens, "value_dim"),
        f"{name}_value_exponent": Part(torch.int8, tokens, free=of_zeros),
        f"{name}_log_weight": Part(torch.float32, tokens, shared=True, free=LOG_ZERO),
    }


PARTS: dict[str, Part] = {
    **_eight_bits("window", "window"),
    **_eight_bits("sink", "sinks"),
    "tier_key": Part(torch.uint8, "slots", "key_bytes"),
    "tier_key_scale": Part(torch.uint8, "slots", "key_blocks"),
    "tier_value": Part(torch.uint8, "slots", "value_bytes"),
    "tier_value_scale": Part(torch.uint8, "slots", "value_blocks"),
    "tier_score": Part(torch.int16, "slots", free=FREE),
}
"""The parts of a group, in the order of a row. Those of window and sinks are the fields of :class:`PackedTokens`, those
of the tier the fields of :class:`CodedTokens`."""

HEAD_NUMBERS = (*PARTS, "slots", "grows", "head", "first")
"""The numbers that describe one KV head: where its parts begin in a row; slots of its tier; 1 if that grows; its index
in the layer; and 1 for the first head of its group, which writes what the heads of a group share."""


@dataclass(frozen=True)
class CompressedState(Tensors):
    """The state of all KV heads of a layer: ``rows`` [B, bytes], uint8, which a :class:`Layout` reads."""

    rows: Tensor


@dataclass(frozen=True)
class Contents:
    """The tokens of one group of heads, as views of a state or made anew."""

    window: PackedTokens
    sinks: PackedTokens
    tier: CodedTokens


class Layout:
    """Where the tokens of a layer's KV heads stand in a row of bytes, group by group.

    Args:
        sizes: of each KV head; heads of one size are a group.
        key_dim, value_dim: numbers of a key and of a value, multiples of 8.
        bits: of the tier, per number.
        capacity: slots of tiers that grow.

    Attributes:
        sizes: of each group.
        heads: the KV heads of each group.
        groups: their numbers.
        bytes: of a row.
    """

    def __init__(
        self, sizes: Sequence[HeadSizes], key_dim: int, value_dim: int, bits: float, capacity: int = 0
    ) -> None:
        self.sizes = list(dict.fromkeys(sizes))
        self.heads = [[head for head, own in enumerate(sizes) if own == size] for size in self.sizes]
        groups = []
        for size, heads in zip(self.sizes, self.heads, strict=True):
            slots, dims = capacity if size.grows else size.newest + size.heavy_hitters, []
            for dim in (key_dim, value_dim):
                blocks = dim // block_size(dim)
                dims += [dim, token_bytes(dim, bits) - blocks, blocks]
            newest = 1 if size.grows else size.newest
            groups.append(Group._make((len(heads), *size[:2], newest, slots, int(size.grows), *dims, ())))
        self._rows = Rows([(part.shape(group), part.dtype) for group in groups for part in PARTS.values()])
        self.bytes = self._rows.bytes
        starts = [tuple(own) for own in self._by_group(self._rows.starts)]
        self.groups = [group._replace(starts=own) for group, own in zip(groups, starts, strict=True)]
        self.order = [head for heads in self.heads for head in heads]
        self.numbers = [number for group in self.groups for number in (*group[:-1], *group.starts)]
        # To make the row before the first token takes as long as to read fifty tokens; those that grow are too large to
        # be kept, one for each number of slots.
        self._before = None if any(size.grows for size in self.sizes) else self._row()

    def _row(self) -> Tensor:
        """The state of one sequence before the first token [1, bytes]."""
        row = torch.zeros(1, self.bytes, dtype=torch.uint8, device="cpu")
        for own in self._by_group(self._rows.cut(row)):
            for x, part in zip(own, PARTS.values(), strict=True):
                x.fill_(part.free)
        return row

    def empty(self, batch: int, device: torch.device) -> CompressedState:
        """The state before the first token."""
        row = self._row() if self._before is None else self._before
        return CompressedState(row.to(device).repeat(batch, 1))

    def open(self, state: CompressedState) -> list[Contents]:
        """The tokens of each group: views."""
        return [
            Contents(PackedTokens(*own[:5]), PackedTokens(*own[5:10]), CodedTokens(*own[10:]))
            for own in self._by_group(self._rows.cut(state.rows))
        ]

    def close(self, contents: Sequence[Contents]) -> CompressedState:
        """The reverse of :meth:`open`: a state of its own memory."""
        tokens = [held for own in contents for held in (own.window, own.sinks, own.tier)]
        return CompressedState(self._rows.joined([part for held in tokens for part in vars(held).values()]))

    def resized(self, state: CompressedState, to: Layout) -> CompressedState:
        """The same tokens in another layout of the layer, with more free slots or fewer."""
        groups = zip(self.open(state), to.groups, strict=True)
        return to.close([replace(own, tier=own.tier.with_slots(group.slots)) for own, group in groups])

    def head_numbers(self) -> list[list[int]]:
        """:data:`HEAD_NUMBERS` of each KV head, group by group."""
        found = []
        for group, heads in zip(self.groups, self.heads, strict=True):
            for n, head in enumerate(heads):
                parts = zip(group.starts, PARTS.values(), strict=True)
                starts = [start + n * part.head_bytes(group) for start, part in parts]
                found.append([*starts, group.slots, group.grows, head, int(n == 0)])
        return found

    @staticmethod
    def _by_group(parts: Sequence[_T]) -> list[Sequence[_T]]:
        """Something of all parts, group by group."""
        return [parts[n : n + len(PARTS)] for n in range(0, len(parts), len(PARTS))]


class Layouts:
    """The layouts of a layer, for more and more tokens, where some of its heads grow. Arguments as for :class:`Layout`.

    Attributes:
        first: the smallest one: the only one where no head grows.
    """

    def __init__(self, sizes: Sequence[HeadSizes], key_dim: int, value_dim: int, bits: float) -> None:
        self._make, self.grow = partial(Layout, sizes, key_dim, value_dim, bits), any(size.grows for size in sizes)
        self._known: dict[int, Layout] = {}  # by slots
        self._sizes: dict[int, Layout] = {}  # by bytes
        self.first = self.with_room(0)

    def with_room(self, tokens: int) -> Layout:
        """The layout for so many tokens."""
        slots = capacity(tokens) if self.grow else 0
        if slots not in self._known:
            self._known[slots] = layout = self._make(slots)
            self._sizes[layout.bytes] = layout
        return self._known[slots]

    def of(self, count: int) -> Layout:
        """The layout of states of so many bytes; ValueError if there is none."""
        slots = 0
        while count not in self._sizes and self.grow and self.with_room(slots).bytes < count:
            slots = capacity(slots + 1)
        if count not in self._sizes:
            raise ValueError(f"no state of this layer has {count} bytes")
        return self._sizes[count]


def capacity(tokens: int) -> int:
    """Slots of a tier that grows, for so many tokens: a quarter more at most, so that it seldom grows."""
    page = max(LEAST_SLOTS, 2 ** (tokens.bit_length() - 3) if tokens > 3 else 1)
    return max(-(-tokens // page), 1) * page


def layout_header() -> str:
    """``layout.h``: :class:`Group` as a struct of C++, with a name for where each part begins."""
    names = (*Group._fields[:-1], *PARTS)
    return (
        "#pragma once\n\n#include <cstdint>\n\nnamespace dofla {\n"
        f"struct GroupNumbers {{\n  std::int64_t {', '.join(names)};\n}};\n"
        f"constexpr std::int64_t kGroupNumbers = {len(names)};\n}}\n"
    )
