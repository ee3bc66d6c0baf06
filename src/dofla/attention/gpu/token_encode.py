"""The first of three kernels of a decoded token: what of it needs no vector of the tier."""

import triton
import triton.language as tl

from dofla.attention.gpu.encode import WAYS, encode_block, rotated_block
from dofla.attention.gpu.numbers import at
from dofla.attention.gpu.rotate_query import columns_of_block, rotate_query
from dofla.attention.gpu.rows import (
    HEAD,
    SINKS,
    SLOTS,
    WINDOW,
    described,
    log_weights_of,
    number,
    row_of,
    score_on_entry,
    scores_of,
    vectors_of,
)

_LAST = tl.constexpr(2**62)
"""Behind all ranks."""


@triton.jit
def encode_and_rotate(
    query,  # [B, heads of the layer, 1, d]
    states,  # rows of bytes
    pages,  # the row of each sequence [B], or None
    descriptions,  # of the heads
    key_constants,  # of the coders
    value_constants,
    tables,
    scratch,  # [units, bytes], for the other kernels
    query_batch,
    query_head,
    row,
    heads,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Encode the token that leaves the window, rotate queries, and find which token is evicted. One program per head of
    a batch row and block of the key, of the value or of the queries; and one for the eviction."""
    DIM: tl.constexpr = KEY.dim
    KEY_BLOCKS: tl.constexpr = KEY.blocks
    VALUE_BLOCKS: tl.constexpr = VALUE.blocks
    GROUPS: tl.constexpr = SHAPE.groups
    unit, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = unit % heads
    own, state = described(descriptions, head), row_of(states, pages, unit // heads, row)
    scratch += unit * SHAPE.scratch
    near_key, near_key_unit, near_value, near_value_unit = vectors_of(state, own, WINDOW)
    entering, paths = scratch + SHAPE.entering, scratch + SHAPE.paths
    if part < KEY_BLOCKS:
        _encode_block(near_key, near_key_unit, key_constants, head, part, tables, paths, entering, KEY)
    elif part < KEY_BLOCKS + VALUE_BLOCKS:
        block, paths, entering = part - KEY_BLOCKS, paths + DIM * WAYS, entering + (KEY.size + KEY_BLOCKS)
        _encode_block(near_value, near_value_unit, value_constants, head, block, tables, paths, entering, VALUE)
    elif part < 2 * KEY_BLOCKS + VALUE_BLOCKS:
        block = part - KEY_BLOCKS - VALUE_BLOCKS
        columns = columns_of_block(key_constants, head, block, KEY)
        query += unit // heads * query_batch + number(own, HEAD) * GROUPS * query_head
        rotated = at(scratch, SHAPE.queries, tl.float32)
        numbers = rotated + GROUPS * (DIM + 1)
        units = numbers + GROUPS * DIM
        for g in range(GROUPS):
            rotate_query(
                *(query + g * query_head, key_constants, head, block, columns),
                *(rotated + g * (DIM + 1), numbers + g * DIM, units + g * KEY_BLOCKS, KEY),
            )
        tl.debug_barrier()  # what one thread stored, another loads
        _in_summands(rotated, numbers, units, at(scratch, SHAPE.asked, tl.float16), block, KEY, SHAPE)
    else:
        # The weights, which heads share, as they are before one of them writes there.
        weights = at(scratch, SHAPE.weights, tl.float32)
        _copy(log_weights_of(state, own, WINDOW), weights, SHAPE.window)
        if SHAPE.sinks > 0:
            _copy(log_weights_of(state, own, SINKS), weights + SHAPE.window, SHAPE.sinks)
        tl.debug_barrier()  # what one thread stored, another loads
        _find_evicted(state, own, weights, at(scratch, SHAPE.evicted, tl.int32), SHAPE)


@triton.jit
def _in_summands(rotated, numbers, units, asked, block, KEY: tl.constexpr, SHAPE: tl.constexpr):
    """Write a block of the queries as factors of products in float16 [3, GROUPS, d]: integers, and the two
    numbers whose sum is a query in units of the integers."""
    BLOCK: tl.constexpr = KEY.block
    GROUPS: tl.constexpr = SHAPE.groups
    g, n = tl.arange(0, triton.next_power_of_2(GROUPS)), tl.arange(0, BLOCK)
    here, place = (g < GROUPS)[:, None] & (n < BLOCK)[None, :], g[:, None] * KEY.dim + (block * BLOCK + n)[None, :]
    unit = tl.load(units + g * KEY.blocks + block, mask=g < GROUPS, other=1.0)[:, None]  # a power of two
    x = tl.load(rotated + place + g[:, None], mask=here, other=0.0) / unit
    near = x.to(tl.float16)
    asked += place
    tl.store(asked, tl.load(numbers + place, mask=here, other=0.0).to(tl.float16), mask=here)
    tl.store(asked + GROUPS * KEY.dim, near, mask=here)
    tl.store(asked + 2 * GROUPS * KEY.dim, (x - near.to(tl.float32)).to(tl.float16), mask=here)


@triton.jit
def _find_evicted(state, own, weights, found, SHAPE: tl.constexpr):
    """Write the slot that a token leaves, and the one that the token from the window enters. Of several tokens with the
    lowest score the oldest leaves; the last slots are those of the oldest."""
    slots = number(own, SLOTS).to(tl.int32)
    on_entry = score_on_entry(weights, SHAPE)
    least = tl.full([1], _LAST, tl.int64)
    for begin in range(0, slots, SHAPE.scores):
        age = begin + tl.arange(0, SHAPE.scores)
        score = scores_of(state, own, slots - 1 - age, age < slots)
        may_go = (age < slots) & ((age <= slots - SHAPE.newest) | (score < 0))
        rank = (score.to(tl.int64) + 1) * slots + age  # no two alike
        least = tl.minimum(least, tl.min(tl.where(may_go, rank, _LAST), axis=0))
    evicted = tl.where(on_entry < 0, slots, slots - 1 - (least % slots).to(tl.int32))
    one = tl.arange(0, 1)
    tl.store(found + one, evicted)
    tl.store(found + 1 + one, tl.where((on_entry < 0) | (least < slots), evicted, 0))  # a free slot is filled as it is


@triton.jit
def _copy(given, to, COUNT: tl.constexpr):
    t = tl.arange(0, triton.next_power_of_2(COUNT))
    tl.store(to + t, tl.load(given + t, mask=t < COUNT), mask=t < COUNT)


@triton.jit
def _encode_block(
    vector,  # in int8
    exponent,
    constants,
    head,
    block,
    tables,
    paths,  # [dim, WAYS]
    entering,  # codes, then scales
    CODER: tl.constexpr,
):
    """Encode one block of a vector."""
    one = tl.arange(0, 1)
    own_exponent = tl.load(at(exponent, 0, tl.int8) + one).to(tl.int32)
    integers, worth = rotated_block(
        at(vector, 0, tl.int8) + one, own_exponent, one == 0, constants, head, block, CODER, 1
    )
    widths = at(constants, CODER.bits, tl.uint8) + head * CODER.blocks
    scales = entering + CODER.size + one
    encode_block(integers, worth, one == 0, block, widths, tables, paths + one, entering + one, scales, CODER, 1)
