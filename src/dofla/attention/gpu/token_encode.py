"""The first of two kernels of a decoded token: what of it needs no token of the tier."""

import triton
import triton.language as tl

from dofla.attention.gpu.encode import WAYS, encode_block, rotated_block
from dofla.attention.gpu.numbers import at
from dofla.attention.gpu.rotate_query import columns_of_block, rotate_query
from dofla.attention.gpu.rows import HEAD, SINKS, WINDOW, described, log_weights_of, number, row_of, vectors_of


@triton.jit
def encode_and_rotate(
    query,  # [B, heads of the layer, 1, d]
    states,  # rows of bytes
    pages,  # the row of each sequence [B], or None
    descriptions,  # of the heads
    key_constants,  # of the coders
    value_constants,
    tables,
    scratch,  # [units, bytes], for the second kernel
    query_batch,
    query_head,
    row,
    heads,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Encode the token that leaves the window, and rotate queries. One program per head of a batch row and block of the
    key, of the value or of the queries."""
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
    else:
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
    if part == 0:  # the weights, which heads share, as they are before one of them writes there
        tl.store(at(scratch, SHAPE.arrived, tl.int32), 0)
        weights = at(scratch, SHAPE.weights, tl.float32)
        _copy(log_weights_of(state, own, WINDOW), weights, SHAPE.window)
        if SHAPE.sinks > 0:
            _copy(log_weights_of(state, own, SINKS), weights + SHAPE.window, SHAPE.sinks)


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
