"""The search for trellis codes (coding/trellis.py) as a Triton kernel. Importing this file needs triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BRANCHES = tl.constexpr(32)
_NOWHERE = tl.constexpr(2**29)


def search(x: Tensor, levels: Tensor, bits: int, fine: int) -> Tensor:
    """Codes [..., n], uint8, of whole numbers ``x`` [..., n], of which ``fine`` are one of the units of ``levels``, as
    many as there are windows: :func:`dofla.attention.coding.trellis.search`."""
    rings = x.to(torch.int32).reshape(-1, x.shape[-1]).contiguous()
    codes = torch.empty(rings.shape, dtype=torch.uint8, device=x.device)
    states = levels.numel() >> bits
    ways = torch.empty(*rings.shape, states, dtype=torch.uint8, device=x.device)
    levels = levels.to(device=x.device, dtype=torch.int32)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _search[(len(rings),)](
            rings, levels, codes, ways, N=x.shape[-1], BITS=bits, STATES=states, FINE=fine, num_warps=1
        )
    return codes.view(x.shape)


@triton.jit
def _search(
    x,  # [rings, N], int32
    levels,  # [STATES << BITS], int32
    codes,  # [rings, N], uint8, to be filled
    ways,  # [rings, N, STATES], uint8, for the program's own use
    N: tl.constexpr,
    BITS: tl.constexpr,
    STATES: tl.constexpr,
    FINE: tl.constexpr,
):
    """One program per ring: a walk from anywhere, begun half a ring before, and one that is held to what it says."""
    ring = tl.program_id(0).to(tl.int64)
    x += ring * N
    codes += ring * N
    ways += ring * N * STATES
    window = tl.arange(0, STATES << BITS)
    level = tl.load(levels + window)
    slope = -2 * _BRANCHES * level
    start = _BRANCHES * FINE * level * level + window // STATES
    state = tl.arange(0, STATES)

    cost = tl.zeros([STATES], tl.int32)
    for i in range(N):
        cost, way = _step(cost, start + slope * tl.load(x + (i + N // 2) % N), STATES, BITS)
        tl.store(ways + i * STATES + state, way.to(tl.uint8))
    tl.debug_barrier()  # what one thread stored, another loads
    closing = tl.min(cost + state, axis=0) & (_BRANCHES - 1)
    for back in range(N // 2):
        closing = _window(ways, N - 1 - back, closing, STATES) >> BITS
    tl.debug_barrier()

    cost = tl.where(state == closing, 0, _NOWHERE)
    for i in range(N):
        cost, way = _step(cost, start + slope * tl.load(x + i), STATES, BITS)
        tl.store(ways + i * STATES + state, way.to(tl.uint8))
    tl.debug_barrier()
    for back in range(N):
        found = _window(ways, N - 1 - back, closing, STATES)
        tl.store(codes + N - 1 - back, (found & ((1 << BITS) - 1)).to(tl.uint8))
        closing = found >> BITS


@triton.jit
def _step(cost, own, STATES: tl.constexpr, BITS: tl.constexpr):
    """Costs of paths [STATES] one number on, and which way they came; ``own`` [STATES << BITS] is what windows cost."""
    begun = tl.reshape(tl.broadcast_to(cost[:, None], [STATES, 1 << BITS]), [STATES << BITS])
    least = tl.min(tl.reshape(begun + own, [1 << BITS, STATES]), axis=0)
    way = least & (_BRANCHES - 1)
    return least - way, way


@triton.jit
def _window(ways, i, state, STATES: tl.constexpr):
    """The window of number i on the path to a state behind it."""
    return tl.load(ways + i * STATES + state).to(tl.int32) * STATES + state
