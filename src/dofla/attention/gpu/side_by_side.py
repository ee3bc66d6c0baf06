"""KV heads of several groups side by side, as one launch of a Triton kernel takes them: their coders as one, their
states as one, and of each head where its parts stand. Importing this file needs triton."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from dofla.attention.coding import Coder
from dofla.attention.flat import Layout
from dofla.attention.rows import Rows

FIELDS = (
    *("NEAR_KEY", "NEAR_KEY_UNIT", "NEAR_VALUE", "NEAR_VALUE_UNIT", "NEAR_WEIGHT"),
    *("SINK_KEY", "SINK_KEY_UNIT", "SINK_VALUE", "SINK_VALUE_UNIT", "SINK_WEIGHT"),
    *("CODES", "SCALES", "VALUE_CODES", "VALUE_SCALES", "SCORE"),
    *("SLOTS", "OF_LAYER", "FIRST"),
)
"""Numbers that describe a head: where its parts begin in a row of bytes (NEAR is the window); slots of its tier; the
head's place in the layer; and 1 for the first head of its group, which keeps what the group's heads share."""
NEAR_KEY, NEAR_KEY_UNIT, NEAR_VALUE, NEAR_VALUE_UNIT, NEAR_WEIGHT = (tl.constexpr(n) for n in range(5))
SINK_KEY, SINK_KEY_UNIT, SINK_VALUE, SINK_VALUE_UNIT, SINK_WEIGHT = (tl.constexpr(n) for n in range(5, 10))
CODES, SCALES, VALUE_CODES, VALUE_SCALES, SCORE = (tl.constexpr(n) for n in range(10, 15))
SLOTS, OF_LAYER, FIRST = (tl.constexpr(n) for n in range(15, 18))
_COUNT = tl.constexpr(len(FIELDS))


@triton.jit
def described(heads, head):
    """The numbers of a head."""
    return heads + head * _COUNT


@triton.jit
def number(own, FIELD: tl.constexpr):
    """One of the numbers of a head."""
    return tl.load(own + FIELD).to(tl.int64)


def descriptions(layouts: Sequence[Layout]) -> list[list[int]]:
    """The numbers of each head of the groups, :data:`FIELDS`, in states side by side."""
    found = []
    starts = accumulate((layout.bytes for layout in layouts), initial=0)
    for layout, start in zip(layouts, starts, strict=False):
        parts = list(zip(_head_sizes(layout), layout.starts, strict=True))
        if not layout.sinks:
            parts[5:5] = [(0, 0)] * 5
        for n, head in enumerate(layout.heads):
            places = [start + begin + n * size for size, begin in parts]
            found.append([*places, layout.coded_tiers.slots[-1], head, int(n == 0)])
    return found


def _head_sizes(layout: Layout) -> list[int]:
    """Bytes of a head in each part of a row; 0 of what the heads share."""
    return [math.prod(shape[1:]) * dtype.itemsize if len(shape) > 1 else 0 for shape, dtype in layout.parts]


def common_rows(states: Sequence[Tensor]) -> Tensor | None:
    """The rows [B, total] of which states [B, bytes] are the parts, in their order, as a view; None if there are none
    such."""
    first, total = states[0], sum(state.shape[1] for state in states)
    place, stride = first.data_ptr(), first.stride(0)
    memory = first.untyped_storage().data_ptr()  # what merely touches is no part of it
    for state in states:
        if state.data_ptr() != place or state.stride() != (stride, 1) or state.untyped_storage().data_ptr() != memory:
            return None
        place += state.shape[1]
    return first.as_strided((len(first), total), (stride, 1))


class JointCoder:
    """The coders of one side of several groups, as one of all their heads. Of the first tier; blocks have bits of their
    own in each head.

    Args:
        coders: of each group, with vectors of one size and one number of bits.
    """

    def __init__(self, coders: Sequence[Coder]) -> None:
        self.coders, self.dim, self.block = list(coders), coders[0].dim, coders[0].block
        self._made_of: list[tuple[Tensor, int]] = []
        self.constants = torch.empty(0)

    def update(self) -> None:
        """Take the coders' constants, if they are others than before, or were written since; where there is room for
        them in the same place, because CUDA graphs read there."""
        # As an attribute it takes ten times as long to find; torch's type says that a buffer may be None.
        found: list[Tensor] = [coder._buffers["constants"] for coder in self.coders]  # type: ignore[misc]
        now = [(x, 0 if x.is_inference() else x._version) for x in found]
        if self._made_of and all(x is y and n == m for (x, n), (y, m) in zip(now, self._made_of, strict=True)):
            return
        bits = [coder.bits[:1].expand(coder.heads, -1) for coder in self.coders]
        names = ("rotation", "fineness", "back", "mean", "middle")
        parts = [torch.cat([getattr(coder, name) for coder in self.coders]) for name in names]
        parts.append(torch.cat(bits))
        rows = Rows([(part.shape, part.dtype) for part in parts])
        constants, self.starts, self._made_of = rows.joined(parts), rows.starts, now
        if constants.shape == self.constants.shape and constants.device == self.constants.device:
            with torch.inference_mode():
                self.constants.copy_(constants)
        else:
            self.constants = constants

    def bytes_per_token(self, tier: int) -> int:
        """The bytes of the codes and scales of one vector of one head."""
        return self.coders[0].bytes_per_token(tier)
