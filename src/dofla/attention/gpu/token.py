"""A decoded token of a compressed cache, from its state in one piece to the next (flat.py), as Triton kernels: in
plain torch it is some four hundred small operations. Importing this file needs triton.

What leaves the window is coded (encode.py) behind the tokens of the tier, queries are rotated (rotate_query.py), one
token goes (heavy_hitters.py) and the others are attended to (tiers.py); what stands in the rows of the state is read
and written as it is (rows.py). Nothing waits for the GPU.
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
from dofla.attention.gpu.tiers import attend

TILE = 32
"""Tokens of a program at once."""


class Decoder:
    """Attention of new tokens of some KV heads of a layer, one by one: heads with a window, one tier that keeps what
    draws attention, and no features.

    Args:
        layout: of their packed cache.
    """

    def __init__(self, layout: Layout) -> None:
        tiers, window, sinks = layout.coded_tiers, layout.window, layout.sinks
        key, value, newest = tiers.key, tiers.value, tiers.counts[0]
        self.key, self.value, self.heads = key, value, tuple(layout.heads)
        self.window, self.newest, self.places = window, newest, newest + tiers.heavy_hitters
        self.longest = max(self.places, window, sinks)
        self.starts = _named(layout.starts, sinks)
        known = self.starts | {"BACK": value.starts[2], "MEAN": value.starts[3], "DIM": key.dim, "VALUE_DIM": value.dim}
        for name, coder in (("KEY", key), ("VALUE", value)):
            blocks = coder.dim // coder.block
            known |= {f"{name}_SIZE": coder.bytes_per_token(0) - blocks, f"{name}_BLOCKS": blocks}
        known |= {"WINDOW": window, "SINKS": sinks, "PLACES": self.places, "TILE": TILE}
        self._of_line, self._of_near, self._of_after = (
            {name: known[name] for name in kernel.arg_names if name in known}
            for kernel in (rows.line, rows.near, rows.write)
        )

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_weight: Tensor | None,
        before: Tensor,
        out: Tensor,
        scaling: float,
        per_step: float,
        weights: Tensor,
    ) -> Tensor:
        """The state after a token.

        Args:
            query: of all heads of the layer, [B, H, 1, d].
            key, value: likewise [B, Hkv, 1, d] and [B, Hkv, 1, dv].
            log_weight: of the token [B, 1], LOG_ZERO for padding; None where there is none.
            before: the state [B, bytes], uint8.
            out: [B, H, 1, dv], whose rows of these heads are to be filled.
            scaling: of the scores.
            per_step, weights: as :func:`dofla.attention.gpu.heavy_hitters.select_survivors` takes them.
        """
        groups, heads, places, row = query.shape[1] // key.shape[1], len(self.heads), self.places, before.shape[-1]
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        of_layer, units = _on_device(self.heads, query.device), len(query) * heads
        after = torch.zeros_like(before)
        keys, values = (empty_line(coder, (len(query), heads, places + 1), 0) for coder in (self.key, self.value))
        score = before.new_empty(len(query), heads, places + 1, dtype=torch.int16)
        log_weights = torch.empty_like(score, dtype=torch.float32)
        new, strides = (key, value, log_weight, of_layer), (*key.stride()[:2], *value.stride()[:2])
        with torch.cuda.device_of(query):  # Triton launches on the current device
            rows.line[(units, block_count(places + 1, TILE))](
                *(before, *keys, *values, score, log_weights, row, heads), **self._of_line
            )
            for coder, name, line in ((self.key, "KEY", keys), (self.value, "VALUE", values)):
                enter(coder, *self._leaving(before, name, coder.dim), line, places)
            rotated, query_integers = rotate_queries(self.key, query, groups, of_layer)
            known = Codes.of(self.key, *keys, 0), Codes.of(self.value, *values, 0)
            real = None if log_weight is None else log_weight > LOG_ZERO
            index, stays, _, evicted_at = select_survivors(
                query_integers, real, known[0], score, self.newest, per_step, weights
            )
            seen, normalizer = attend(rotated, *known, log_weights, evicted_at, scaling)
            rows.near[(units * groups,)](
                *(query, *new, before, self.value.constants, seen, normalizer, out),
                *(*query.stride()[:2], *strides, *out.stride()[:2], row, heads, groups, scaling),
                **self._of_near,
            )
            rows.write[(units, block_count(self.longest, TILE))](
                *(*new, before, *keys, *values, index, stays, after, *strides, row, heads), **self._of_after
            )
        return after

    def _leaving(self, before: Tensor, name: str, dim: int) -> tuple[Tensor, Tensor]:
        """The vectors of the oldest token of the window, integers [B, Hkv, 1, dim] and exponents [B, Hkv, 1], int8."""
        numbers, window = before.view(torch.int8), self.window
        shape, row = (len(before), len(self.heads), 1), before.shape[-1]
        integers = numbers.as_strided((*shape, dim), (row, window * dim, dim, 1), self.starts[f"NEAR_{name}"])
        return integers, numbers.as_strided(shape, (row, window, 1), self.starts[f"NEAR_{name}_UNIT"])


@cache
def _on_device(heads: tuple[int, ...], device: torch.device) -> Tensor:
    """Once, for the CPU waits for a GPU while it copies something there."""
    return torch.tensor(heads, dtype=torch.int32, device=device)


def _named(starts: Sequence[int], sinks: int) -> dict[str, int]:
    """The offsets in a row of bytes by the kernels' names for them; those of sinks are 0 if there are none."""
    vectors = ("KEY", "KEY_UNIT", "VALUE", "VALUE_UNIT", "WEIGHT")
    near, first = ([f"{where}_{name}" for name in vectors] for where in ("NEAR", "SINK"))
    names = [*near, *(first if sinks else ()), "CODES", "SCALES", "VALUE_CODES", "VALUE_SCALES", "SCORE"]
    return dict.fromkeys(first, 0) | dict(zip(names, starts, strict=True))
