"""Vectors in int8 (eight_bits.py) and codes of a compressed cache as Triton kernels: vectors are rotated exactly
(coding/coder.py), codes searched for by Viterbi's algorithm (coding/trellis.py) and packed (coding/blocks.py).

All arithmetic is that of plain torch, bit for bit: integers below 2²⁴, powers of two, and single operations, each
rounded by itself; so none may be fused with another. How many bits a block has stands on the GPU and is read there.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from dofla.attention.coding.coder import Coder, Codes
from dofla.attention.coding.levels import SCALES_AT
from dofla.attention.constants import BRANCHES, FINE, NOWHERE, UNIT, WINDOW
from dofla.attention.gpu import block_count
from dofla.attention.gpu.codes import Coding, JointCoder, joint, tables_on
from dofla.attention.gpu.numbers import at, exponent_of, power_of_two, rounded, whole
from dofla.attention.heads import on_device

VECTORS = tl.constexpr(32)
"""Vectors of a program that packs them."""

RINGS = 16
"""Vectors of a program at most, of each one block: they walk side by side."""

SCRATCH = 2**26
"""Bytes at most that a launch keeps the ways of its paths in; a long prompt takes several."""

_BRANCHES = tl.constexpr(BRANCHES)
_NOWHERE = tl.constexpr(NOWHERE)
_BORDERS_AT = tl.constexpr(SCALES_AT + 256)
WAYS = tl.constexpr(2 ** (WINDOW - 1) + 5)
"""Bytes that a program needs for each number that it codes: which way its paths came, the number and its window."""

_FINE = tl.constexpr(FINE)
_SCALE = tl.constexpr(float(FINE * UNIT))
"""Code of a number as large as its block: units of a level, :data:`_FINE` to one."""


def pack(x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors [B, H, L, d], float32 or bfloat16, as integers [B, H, L, d] and exponents [B, H, L], both int8."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, length, dim = x.shape
    integers = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    exponents = torch.empty(x.shape[:-1], dtype=torch.int8, device=x.device)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _pack[(batch * heads, triton.cdiv(length, VECTORS.value))](
            *(x, integers, exponents, *x.stride()[:3], heads, length, dim),
            DIM=triton.next_power_of_2(dim),
            enable_fp_fusion=False,
        )
    return integers, exponents


@triton.jit
def _pack(x, integers, exponents, of_batch, of_head, of_token, heads, length, dim, DIM: tl.constexpr):
    unit, n = tl.program_id(0).to(tl.int64), tl.arange(0, DIM)
    token = tl.program_id(1) * VECTORS + tl.arange(0, VECTORS)
    mask = (token < length)[:, None] & (n < dim)[None, :]
    place = (unit // heads) * of_batch + (unit % heads) * of_head + token[:, None] * of_token + n[None, :]
    own = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    exponent = exponent_of(tl.max(tl.abs(own), axis=1)) - 7
    exponent = tl.minimum(tl.maximum(exponent, -120), 120)
    found = tl.minimum(tl.maximum(rounded(own * power_of_two(-exponent)[:, None]), -127.0), 127.0)
    row = unit * length + token
    tl.store(integers + row[:, None] * dim + n[None, :], found.to(tl.int8), mask=mask)
    tl.store(exponents + row, exponent.to(tl.int8), mask=token < length)


def encode(coder: Coder, x: Tensor) -> Codes:
    """Codes [B, Hkv, L, bytes] and scales [B, Hkv, L, blocks], uint8, of vectors [B, Hkv, L, d], float32 or bfloat16:
    :meth:`dofla.attention.Coder.encode`."""
    codes, scales = (part.unflatten(1, x.shape[1:3]) for part in _encode_last(coder, 0, x))
    return codes, scales


def encode_last(coders: Sequence[Coder], vectors: Sequence[Tensor], counts: Sequence[int]) -> list[Codes]:
    """The same of the last so many of each coder's vectors [B, Hkv, L, d]: coders of one size in one launch."""
    alike: dict[tuple[int, float], list[int]] = {}
    for n, coder in enumerate(coders):
        alike.setdefault((coder.dim, coder.mean_bits), []).append(n)
    found: dict[int, Codes] = {}
    for own in alike.values():
        together, heads = joint([coders[n] for n in own]), [coders[n].heads for n in own]
        x = torch.cat([vectors[n] for n in own], 1)
        of_heads = [counts[n] for n, count in zip(own, heads, strict=True) for _ in range(count)]
        parts = [counts[n] * count for n, count in zip(own, heads, strict=True)]
        sides = (part.split(parts, 1) for part in _encode_last(together, together.dim // together.block, x, of_heads))
        for n, count, codes, scales in zip(own, heads, *sides, strict=True):
            found[n] = codes.unflatten(1, (count, -1)), scales.unflatten(1, (count, -1))
    return [found[n] for n in range(len(coders))]


def _encode_last(coder: Coder | JointCoder, bits_of_head: int, x: Tensor, counts: Sequence[int] | None = None) -> Codes:
    """Codes [B, n, bytes] and scales [B, n, blocks] of the last so many vectors of each head, or of all, head after
    head. A head's bits of blocks stand so many bytes behind those of the one before."""
    integers, exponents = pack(x)
    batch, heads, length = x.shape[:3]
    constants, coding = coder.constants, Coding.of(coder)
    places, count = None, heads * length
    if counts is not None:
        *begins, count = accumulate(counts, initial=0)
        places = on_device(tuple((length - own, begin) for own, begin in zip(counts, begins, strict=True)), x.device)
    sizes = coding.size, coding.blocks
    codes, scales = (torch.empty(batch, count, size, dtype=torch.uint8, device=constants.device) for size in sizes)
    per_token = batch * heads * coder.dim * WAYS.value
    piece = min(length, max(RINGS, SCRATCH // per_token))
    scratch = codes.new_empty(piece * per_token)
    rings = min(RINGS, triton.next_power_of_2(piece))
    with torch.cuda.device_of(codes):  # Triton launches on the current device
        for start in range(0, length, piece):
            _code[(batch * heads, block_count(piece, rings), coding.blocks)](
                *(integers, exponents, constants, tables_on(constants.device), places, scratch, codes, scales),
                *(heads, length, count, bits_of_head, start, piece),
                CODER=coding,
                RINGS=rings,
                enable_fp_fusion=False,
                num_warps=1,
            )
    return codes, scales


@triton.jit
def _code(
    integers,  # [units, L, dim]
    exponents,  # [units, L]
    constants,  # of the coder
    tables,
    places,  # [heads, 2], the first vector that is coded, and where its code stands among those of all heads; or None
    scratch,  # [units, piece, dim, WAYS], for the program's own use
    codes,  # [B, count, bytes], to be filled
    scales,  # [B, count, blocks], to be filled
    heads,
    length,
    count,  # of vectors that are coded, of all heads
    bits_of_head,  # bytes from the bits of one head's blocks to the next
    start,  # of the vectors that this launch codes
    piece,  # how many they are
    CODER: tl.constexpr,
    RINGS: tl.constexpr,
):
    """One program per head of a batch row, some vectors and one block of each."""
    DIM: tl.constexpr = CODER.dim
    BLOCKS: tl.constexpr = CODER.blocks
    unit, block = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = unit % heads
    first, begin = tl.zeros_like(head), head * length
    if places is not None:
        first, begin = tl.load(places + 2 * head), tl.load(places + 2 * head + 1)
    of_piece = tl.program_id(1) * RINGS + tl.arange(0, RINGS)
    if start + (tl.program_id(1) + 1) * RINGS > first:
        token = start + of_piece
        is_token = (of_piece < piece) & (token >= first) & (token < length)
        exponent = tl.load(exponents + unit * length + token, mask=is_token, other=0).to(tl.int32)
        vectors = integers + (unit * length + token) * DIM
        own, worth = rotated_block(vectors, exponent, is_token, constants, head, block, CODER, RINGS)
        bits = at(constants, CODER.bits, tl.uint8) + head * bits_of_head
        ways = scratch + (unit * piece + of_piece) * (DIM * WAYS)
        place = unit // heads * count + begin + token - first
        code, scale = codes + place * CODER.size, scales + place * BLOCKS
        encode_block(own, worth, is_token, block, bits, tables, ways, code, scale, CODER, RINGS)


@triton.jit
def rotated_block(
    vectors,  # [RINGS], where the integers of each begin
    exponent,  # [RINGS], of what their integers are worth
    is_token,  # [RINGS]
    constants,  # of the coder
    head,
    block,
    CODER: tl.constexpr,
    RINGS: tl.constexpr,
):
    """A block of vectors in int8 as it is coded: integers [RINGS, block], and what one is worth [RINGS]."""
    DIM: tl.constexpr = CODER.dim
    BLOCK: tl.constexpr = CODER.block
    CHUNK: tl.constexpr = CODER.padded // RINGS
    row = head * DIM + block * BLOCK + tl.arange(0, BLOCK)
    rotated = tl.zeros([RINGS, BLOCK], tl.float32)
    for begin in range(0, DIM, CHUNK):  # exact: integers below 2²⁴
        d = begin + tl.arange(0, CHUNK)
        rotation = at(constants, CODER.rotation, tl.int16) + row[:, None] * DIM + d[None, :]
        rotation = tl.load(rotation, mask=(d < DIM)[None, :], other=0).to(tl.float32)
        here = is_token[:, None] & (d < DIM)[None, :]
        vector = tl.load(vectors[:, None] + d[None, :], mask=here, other=0).to(tl.float32)
        rotated += tl.sum(rotation[None, :, :] * vector[:, None, :], axis=2)
    fine = tl.load(at(constants, CODER.fineness, tl.float32) + row)[None, :] * power_of_two(exponent)[:, None]
    return whole(rotated * fine - tl.load(at(constants, CODER.middle, tl.float32) + row)[None, :])


@triton.jit
def encode_block(
    own,  # [RINGS, block], integers
    worth,  # [RINGS], of one of them
    is_token,  # [RINGS]
    block,
    widths,  # [blocks], uint8, the bits of each block
    tables,
    scratch,  # [RINGS], where there is room for dim * WAYS bytes
    codes,  # [RINGS], where those of the vector begin
    scales,  # likewise
    CODER: tl.constexpr,
    RINGS: tl.constexpr,
):
    """Write the code and the scale of a block of vectors."""
    BLOCK: tl.constexpr = CODER.block
    BLOCKS: tl.constexpr = CODER.padded_blocks
    n, every = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
    squares = tl.sum(own * own, axis=1)
    root = tl.sqrt_rn(squares * (1.0 / BLOCK))  # the product is exact, a division would not be
    wanted = rounded(tl.div_rn(own * _SCALE, tl.zeros_like(own) + tl.maximum(root, 1e-3)[:, None]))

    sizes = tl.load(widths + every, mask=every < CODER.blocks, other=0).to(tl.int32)
    before = tl.sum(tl.where(every < block, sizes, 0), axis=0) * (BLOCK // 8)
    bits = tl.sum(tl.where(every == block, sizes, 0), axis=0)
    scratch += block * (BLOCK * WAYS)
    x = at(scratch, 0, tl.int32)
    found = scratch + 4 * BLOCK
    ways = scratch + 5 * BLOCK
    tl.store(x[:, None] + n[None, :], wanted.to(tl.int32), mask=is_token[:, None])
    tl.debug_barrier()  # what one thread stored, another loads
    for BITS in tl.static_range(1, 6):
        if bits == BITS:
            _search(x, tables + 64 * (BITS - 1), found, ways, is_token, N=BLOCK, BITS=BITS, RINGS=RINGS)
    tl.debug_barrier()

    window = tl.load(found[:, None] + n[None, :], mask=is_token[:, None], other=0).to(tl.int32)
    level = tl.load(tables + (bits - 1) * 64 + window)
    square = tl.div_rn(squares, tl.sum(level * level, axis=1)) * (worth * worth)
    border = tl.load(tables + _BORDERS_AT + tl.arange(0, 256))
    scale = tl.sum((border[None, :] < square[:, None]).to(tl.int32), axis=1)
    tl.store(scales + block, scale.to(tl.uint8), mask=is_token)
    here = is_token[:, None] & (n < bits * (BLOCK // 8))[None, :]
    byte = tl.zeros([RINGS, BLOCK], tl.int32)
    for bit in range(8):
        from_low = 8 * n + bit
        of = BLOCK - 1 - from_low // bits  # the number that the bit is of: those of the last one are the lowest
        window = tl.load(found[:, None] + of[None, :], mask=here, other=0).to(tl.int32)
        byte |= (window >> (from_low % bits)[None, :] & 1) << bit
    tl.store(codes[:, None] + before + n[None, :], byte.to(tl.uint8), mask=here)


@triton.jit
def _search(
    x,  # [RINGS], where the N integers of each ring begin, int32
    levels,  # [64]
    found,  # [RINGS], where the windows of its numbers are to stand, uint8
    ways,  # [RINGS], where there is room for N times 32 bytes
    is_ring,  # [RINGS]
    N: tl.constexpr,
    BITS: tl.constexpr,
    RINGS: tl.constexpr,
):
    """A walk from anywhere, begun half a ring before, and one that is held to what it says."""
    STATES: tl.constexpr = 64 >> BITS
    window = tl.arange(0, STATES << BITS)
    level = tl.load(levels + window).to(tl.int32)
    slope = -2 * _BRANCHES * level
    start = _BRANCHES * _FINE * level * level + window // STATES
    state = tl.arange(0, STATES)[None, :]
    own_ways = ways[:, None] + state

    cost = tl.zeros([RINGS, STATES], tl.int32)
    for i in range(N):
        number = tl.load(x + (i + N // 2) % N, mask=is_ring, other=0)
        cost, way = _step(cost, start[None, :] + slope[None, :] * number[:, None], RINGS, STATES, BITS)
        tl.store(own_ways + i * STATES, way.to(tl.uint8), mask=is_ring[:, None])
    tl.debug_barrier()
    closing = tl.min(cost + state, axis=1) & (_BRANCHES - 1)
    for back in range(N // 2):
        closing = _window(ways, N - 1 - back, closing, is_ring, STATES) >> BITS
    tl.debug_barrier()

    cost = tl.where(state == closing[:, None], 0, _NOWHERE)
    for i in range(N):
        number = tl.load(x + i, mask=is_ring, other=0)
        cost, way = _step(cost, start[None, :] + slope[None, :] * number[:, None], RINGS, STATES, BITS)
        tl.store(own_ways + i * STATES, way.to(tl.uint8), mask=is_ring[:, None])
    tl.debug_barrier()
    for back in range(N):
        own = _window(ways, N - 1 - back, closing, is_ring, STATES)
        tl.store(found + N - 1 - back, own.to(tl.uint8), mask=is_ring)
        closing = own >> BITS


@triton.jit
def _step(cost, own, RINGS: tl.constexpr, STATES: tl.constexpr, BITS: tl.constexpr):
    """Costs of paths [RINGS, STATES] one number on, and their ways; ``own`` [RINGS, STATES << BITS]: of windows."""
    begun = tl.broadcast_to(cost[:, :, None], [RINGS, STATES, 1 << BITS])
    total = tl.reshape(begun, [RINGS, STATES << BITS]) + own
    least = tl.min(tl.reshape(total, [RINGS, 1 << BITS, STATES]), axis=1)
    way = least & (_BRANCHES - 1)
    return least - way, way


@triton.jit
def _window(ways, i, state, is_ring, STATES: tl.constexpr):
    """The windows of number i on the paths to a state behind it."""
    return tl.load(ways + i * STATES + state, mask=is_ring, other=0).to(tl.int32) * STATES + state
