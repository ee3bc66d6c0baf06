"""A decoded token of compressed caches, as three Triton kernels: in plain torch it is some four hundred small
operations.

The first kernel encodes what leaves the window, rotates queries and finds which token is evicted (token_encode.py). The
second attends (token_attend.py), the last updates the states in place (token_update.py). Heads with one local window
are done at once. Nothing waits for the GPU.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from dofla.attention.backend import Compressed
from dofla.attention.call import Call
from dofla.attention.coding.heavy_hitters import weight_steps
from dofla.attention.gpu import block_count, block_size
from dofla.attention.gpu.codes import Coding, JointCoder, joint, tables_on
from dofla.attention.gpu.encode import WAYS
from dofla.attention.gpu.token_attend import SUMMANDS, attend
from dofla.attention.gpu.token_encode import encode_and_rotate
from dofla.attention.gpu.token_update import update
from dofla.attention.layout import Group, Layout
from dofla.attention.rows import Rows

TILE = 32
"""Tokens that a program attends to at once."""
PARTS = 64
"""Programs at most that share the tier of a head between them."""
PROGRAMS = 2048
"""Programs that keep a GPU busy: with more heads than that, fewer share one."""
ROWS = 64
"""Rows of a product at most."""
SCORES = 256
"""Scores that a program compares at once."""
MOVED = 4096
"""Bytes at most that a program moves at once: what fits into its registers."""


class Shape(NamedTuple):
    """Sizes that the kernels of a token know when they are compiled, beside the codings of keys and values."""

    groups: int  # query heads of a KV head
    window: int  # tokens
    sinks: int  # tokens
    places: int  # slots of the largest tier that evicts
    lanes: int  # the power of two that holds them and one more
    newest: int  # tokens of a tier that cannot go
    rows: int  # queries of a program that attends
    joined: int  # queries whose sums are joined at once
    tile: int  # tokens of a program at once
    scores: int  # compared at once
    moved: int  # tokens of the window that it moves at once
    moved_up: int  # ... of a tier
    scratch: int  # bytes of a head between the kernels, and then where its parts begin
    evicted: int  # the slot that a token leaves, and the one that another enters, int32
    weights: int  # of window and sinks, as they were
    entering: int  # codes and scales of the token that enters
    queries: int  # rotated [groups, d + 1], as integers [groups, d], and their units [groups, blocks]
    asked: int  # their integers, and two summands of each, float16 [3, groups, d]
    steps: int  # of the logarithms of weights [groups, places + 1]
    sums: int  # of each part's softmax: the largest scores [parts, groups], masses, and values [parts, groups, dv]
    paths: int  # of the search for codes


def alike(group: Group) -> tuple[int, ...]:
    """Sizes that groups decoded together have in common: the window, what cannot go, and vectors."""
    return group.window, group.sinks, group.newest, group.key_dim, group.value_dim


class Decoder:
    """Attention of new tokens of some groups of KV heads of a layer, which are :func:`alike`, one by one."""

    def __init__(self, heads: Compressed, layout: Layout, groups: Sequence[int]) -> None:
        # No heads are held: decoders go with them (operators.py).
        first = layout.groups[groups[0]]
        self.window, self.sinks, self.newest = first.window, first.sinks, first.newest
        keys, values = heads.coders
        self._coders = joint([keys[n] for n in groups]), joint([values[n] for n in groups])
        own = {head for n in groups for head in layout.heads[n]}
        self.descriptions = tuple(
            tuple(numbers) for head, numbers in zip(layout.order, layout.head_numbers(), strict=True) if head in own
        )
        slots = [(layout.groups[n].slots, layout.groups[n].grows) for n in groups]
        self.places = max((n for n, grows in slots if not grows), default=0)
        self.most, self.grows = max(n for n, _ in slots), any(grows for _, grows in slots)
        self.parts = min(PARTS, block_count(self.most + 1, TILE))
        self._known: dict[int, tuple[Coding, Coding, Shape]] = {}
        self._on: dict[torch.device, Tensor] = {}  # descriptions

    def coders(self) -> tuple[JointCoder, JointCoder]:
        """Coders of keys and of values, of all heads; as they are now, if one was calibrated, loaded or moved."""
        for side in self._coders:
            side.update()
        return self._coders

    def constants(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All that kernels look up: descriptions of the heads, the coders' constants, and tables."""
        keys, values = self.coders()
        if device not in self._on:
            with torch.inference_mode(False):
                self._on[device] = torch.tensor(self.descriptions, dtype=torch.int32, device=device)
        return self._on[device], keys.constants, values.constants, tables_on(device)

    def __call__(self, call: Call, states: Tensor, out: Tensor, pages: Tensor | None = None) -> None:
        """Attention of a token, and the states after it, as :func:`dofla.attention.gpu.operators.decode`. Of ``out``
        [B, H, 1, dv], in one piece, the rows of these heads are filled."""
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in call.vectors)
        device, batch, groups = query.device, len(query), call.groups
        per_step, weights = weight_steps(call.scaling, device)
        heads, constants = len(self.descriptions), self.constants(device)
        if groups not in self._known:
            of_keys, of_values = map(Coding.of, self.coders())
            self._known[groups] = of_keys, of_values, self._shape(groups, of_keys, of_values)
        of_keys, of_values, shape = self._known[groups]
        scratch = torch.empty(batch * heads * shape.scratch, dtype=torch.uint8, device=device)
        known = {"KEY": of_keys, "VALUE": of_values, "SHAPE": shape, "enable_fp_fusion": False}
        with torch.cuda.device_of(query):  # Triton launches on the current device
            encode_and_rotate[(batch * heads, 2 * of_keys.blocks + of_values.blocks + 1)](
                *(query, states, pages, *constants, scratch, *query.stride()[:2], states.stride(0), heads),
                **known,
                num_warps=1,
            )
            parts = max(1, min(self.parts, PROGRAMS // (batch * heads)))
            strides = *key.stride()[:2], *value.stride()[:2]
            attend[(batch * heads, parts + 1, block_count(groups, shape.rows))](
                *(query, key, value, call.log_weight, states, pages, *constants, scratch),
                *(*query.stride()[:2], *strides, states.stride(0), heads, call.scaling, per_step),
                **known,
                num_warps=max(1, of_values.padded // 16),
                maxnreg=128,  # so that four programs are on a multiprocessor, rather than two
                num_stages=1,
            )
            descriptions, _, of_value_coder, _ = constants
            update[(batch * heads,)](
                *(key, value, call.log_weight, states, pages, descriptions, of_value_coder, weights, scratch, out),
                *(*strides, out.stride(0), states.stride(0), heads, parts + 1),
                **known,
                num_warps=4,
            )

    def _shape(self, groups: int, key: Coding, value: Coding) -> Shape:
        per_token = key.size + key.blocks + value.size + value.blocks
        # Kernels are compiled for a shape. That of heads that grow is the same however far they have.
        parts = PARTS if self.grows else self.parts
        scores = SCORES if self.grows else min(SCORES, triton.next_power_of_2(self.most))
        scratch = Rows(
            [
                ((2,), torch.int32),
                ((self.window + self.sinks,), torch.float32),
                ((per_token,), torch.uint8),
                ((groups, 2 * key.dim + 1 + key.blocks), torch.float32),
                ((3, groups, key.dim), torch.float16),
                ((groups, self.places + 1), torch.float32),
                ((parts + 1, groups, value.dim + 2), torch.float32),
                ((key.dim + value.dim, WAYS.value), torch.uint8),
            ]
        )
        lanes = triton.next_power_of_2(self.places + 1)
        window, tier = map(triton.next_power_of_2, (key.dim + value.dim + 2, per_token))
        sizes = groups, self.window, self.sinks, self.places, lanes, self.newest
        queries = min(max(triton.next_power_of_2(groups), 16 // SUMMANDS.value), ROWS // SUMMANDS.value)
        tiles = queries, block_size(groups, ROWS), TILE, scores
        moved = max(1, MOVED // window), max(1, min(lanes, MOVED // 2 // tier))
        return Shape(*sizes, *tiles, *moved, scratch.bytes, *scratch.starts)
