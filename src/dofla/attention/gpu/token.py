"""A decoded token of compressed caches, from their states in one piece to the next (flat.py), as Triton kernels: in
plain torch it is some four hundred small operations. Importing this file needs triton.

What leaves the window is coded (encode.py) behind the tokens of the tier, queries are rotated (rotate_query.py), one
token goes (heavy_hitters.py) and the others are attended to (tiers.py); what stands in the rows of the state is read
and written as it is (rows.py). Heads of all sizes are done at once (side_by_side.py). Nothing waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from dofla.attention.constants import LOG_ZERO
from dofla.attention.flat import Layout
from dofla.attention.gpu import block_count, rows
from dofla.attention.gpu.codes import Codes
from dofla.attention.gpu.encode import empty_line, enter
from dofla.attention.gpu.heavy_hitters import select_survivors
from dofla.attention.gpu.rotate_query import rotate_queries
from dofla.attention.gpu.side_by_side import OF_LAYER, JointCoder, descriptions, made_of
from dofla.attention.gpu.tiers import attend

TILE = 32
"""Tokens of a program at once."""


def alike(layout: Layout) -> tuple[object, ...]:
    """Properties that groups decoded together have in common: all but the size of their tiers."""
    tiers = layout.coded_tiers
    return layout.window, layout.sinks, tiers.counts[0], tiers.key.tiers, tiers.key.dim, tiers.value.dim


class Decoder:
    """Attention of new tokens of groups of KV heads of a layer, one by one: heads with a window, one tier that keeps
    what draws attention, and no features.

    Args:
        layouts: of the groups' packed caches, which are :func:`alike`.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        first = layouts[0]
        tiers, window, sinks = first.coded_tiers, first.window, first.sinks
        self.window, self.newest, self.bytes = window, tiers.counts[0], [layout.bytes for layout in layouts]
        self._sides = [x.coded_tiers.key for x in layouts], [x.coded_tiers.value for x in layouts]
        self.numbers = tuple(map(tuple, descriptions(layouts)))
        slots = [layout.coded_tiers.slots[-1] for layout in layouts for _ in layout.heads]
        self.places = max(slots)
        self.firsts = None if min(slots) == max(slots) else tuple((self.places - n,) for n in slots)
        self.longest = max(self.places, window, sinks)
        self.row = sum(self.bytes)
        known = {"DIM": tiers.key.dim, "VALUE_DIM": tiers.value.dim, "WINDOW": window, "SINKS": sinks, "TILE": TILE}
        for name, coder in (("KEY", tiers.key), ("VALUE", tiers.value)):
            blocks = coder.dim // coder.block
            known |= {f"{name}_SIZE": coder.bytes_per_token(0) - blocks, f"{name}_BLOCKS": blocks}
        self._of_line, self._of_near, self._of_after = (
            {name: known[name] for name in kernel.arg_names if name in known}
            for kernel in (rows.line, rows.near, rows.write)
        )
        self._coders: tuple[JointCoder, JointCoder] | None = None

    def coders(self) -> tuple[JointCoder, JointCoder]:
        """Coders of keys and of values, of all heads; made again when one of theirs was calibrated, loaded or moved."""
        known, sides = self._coders, self._sides
        if known is None or any(own.made_of != made_of(side) for own, side in zip(known, sides, strict=True)):
            known = self._coders = JointCoder(sides[0]), JointCoder(sides[1])
        return known

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_weight: Tensor | None,
        states: Tensor,
        after: Tensor,
        out: Tensor,
        scaling: float,
        per_step: float,
        weights: Tensor,
        pages: Tensor | None = None,
    ) -> None:
        """Attention of a token, and the states after it.

        Args:
            query: of all heads of the layer, [B, H, 1, d].
            key, value: likewise [B, Hkv, 1, d] and [B, Hkv, 1, dv].
            log_weight: of the token [B, 1], LOG_ZERO for padding; None where there is none.
            states: before, those of the groups beside one another in rows [B, total] without gaps, uint8.
            after: likewise, to be filled; or a pool of such rows, which may have gaps.
            out: [B, H, 1, dv], whose rows of these heads are to be filled.
            scaling: of the scores.
            per_step, weights: as :func:`dofla.attention.gpu.heavy_hitters.select_survivors` takes them.
            pages: row in the pool of each sequence [B]; None where ``after`` is no pool.
        """
        device, batch, groups = query.device, len(query), query.shape[1] // key.shape[1]
        heads, places = len(self.numbers), self.places
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        units, of_heads = batch * heads, on_device(self.numbers, device)
        firsts = None if self.firsts is None else on_device(self.firsts, device)
        coders = self.coders()
        lines = [empty_line(coder, (batch, heads, places + 1), 0) for coder in coders]
        score = states.new_empty(batch, heads, places + 1, dtype=torch.int16)
        log_weights = torch.empty_like(score, dtype=torch.float32)
        leaving = [states.new_empty(batch, heads, 1, n, dtype=torch.int8) for x in coders for n in (x.dim, 1)]
        new, strides = (key, value, log_weight, of_heads), (*key.stride()[:2], *value.stride()[:2])
        with torch.cuda.device_of(query):  # Triton launches on the current device
            rows.line[(units, block_count(places + 1, TILE))](
                *(states, of_heads, *lines[0], *lines[1], score, log_weights, *leaving, self.row, heads, places),
                **self._of_line,
            )
            for n, coder in enumerate(coders):
                enter(coder, leaving[2 * n], leaving[2 * n + 1].squeeze(-1), lines[n], places)
            rotated, query_integers = rotate_queries(coders[0], query, groups, of_heads[:, OF_LAYER.value])
            known = [Codes.of(coder, *line, 0) for coder, line in zip(coders, lines, strict=True)]
            real = None if log_weight is None else log_weight > LOG_ZERO
            index, stays, _, evicted_at = select_survivors(
                query_integers, real, known[0], score, self.newest, per_step, weights, firsts
            )
            seen, normalizer = attend(rotated, known[0], known[1], log_weights, evicted_at, scaling)
            rows.near[(units * groups,)](
                *(query, *new, states, coders[1].constants, seen, normalizer, out),
                *(*query.stride()[:2], *strides, *out.stride()[:2], self.row, heads, groups, scaling),
                BACK=coders[1].starts[2],
                MEAN=coders[1].starts[3],
                **self._of_near,
            )
            rows.write[(units, block_count(self.longest, TILE))](
                *(*new, states, *lines[0], *lines[1], index, stays, after, pages),
                *(*strides, self.row, after.stride(0), heads, places),
                **self._of_after,
            )


@cache
def on_device(numbers: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Once, for the CPU waits for a GPU while it copies something there."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)
