"""The last of three kernels of a decoded token: the output from the sums of all parts, and the states after it."""

import triton
import triton.language as tl

from dofla.attention.gpu import rows
from dofla.attention.gpu.heavy_hitters import drawn_by
from dofla.attention.gpu.numbers import at
from dofla.attention.gpu.tier import PRECISION as _PRECISION

PRECISION = tl.constexpr(_PRECISION)


@triton.jit
def update(
    key,  # of the new token
    value,
    log_weight,  # [B], or None
    states,  # rows of bytes
    pages,  # the row of each sequence [B], or None
    descriptions,  # of the heads
    value_constants,
    attention_weights,  # by steps
    scratch,  # [units, bytes], as the kernels before left it
    out,  # [B, heads of the layer, 1, dv], in one piece, to be filled
    key_batch,
    key_head,
    value_batch,
    value_head,
    out_batch,
    row,
    heads,
    parts,  # that the tokens of a head were divided into
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """One program per head of a batch row."""
    GROUPS: tl.constexpr = SHAPE.groups
    ROWS: tl.constexpr = SHAPE.joined
    LANES: tl.constexpr = SHAPE.lanes
    unit = tl.program_id(0).to(tl.int64)
    batch, head = unit // heads, unit % heads
    own, state = rows.described(descriptions, head), rows.row_of(states, pages, batch, row)
    slots, kv_head = rows.number(own, rows.SLOTS).to(tl.int32), rows.number(own, rows.HEAD)
    scratch += unit * SHAPE.scratch
    out += batch * out_batch + kv_head * GROUPS * VALUE.dim
    for first in range(0, GROUPS, ROWS):
        _join(
            *(at(scratch, SHAPE.sums, tl.float32), value_constants, head, out),
            *(parts, first + tl.arange(0, ROWS), VALUE, SHAPE),
        )
    counts, weight = rows.weight_of(log_weight, batch)
    weights, changed = at(scratch, SHAPE.weights, tl.float32), at(scratch, SHAPE.evicted, tl.int32)
    evicted, enters = tl.load(changed), tl.load(changed + 1)
    if rows.number(own, rows.GROWS) == 0:
        slot = tl.arange(0, LANES)
        score = rows.scores_of(state, own, slot, slot < slots)
        there = (slot <= slots) & (slot != evicted)
        if counts > 0:  # a query that is padding draws nothing
            g = tl.arange(0, triton.next_power_of_2(GROUPS))
            steps = at(scratch, SHAPE.steps, tl.float32) + g[:, None] * (SHAPE.places + 1) + slot[None, :]
            score = drawn_by(steps, g < GROUPS, score, there & (score >= 0), attention_weights)
        after = tl.where(slot == slots, enters, slot + ((slot >= enters) & (slot < evicted)).to(tl.int32))
        tl.debug_barrier()  # all have loaded what others overwrite
        tl.store(rows.tier_scores(state, own) + after, score.to(tl.int16), mask=there)
    elif evicted < slots:
        tl.store(rows.tier_scores(state, own) + enters, tl.zeros([], tl.int16))
    rows.update_tier(state, own, slots, enters, evicted, scratch + SHAPE.entering, KEY, VALUE, SHAPE)
    rows.update_window(
        *(state, own, key + batch * key_batch + kv_head * key_head),
        *(value + batch * value_batch + kv_head * value_head, weight, weights, KEY, VALUE, SHAPE),
    )


@triton.jit
def _join(
    sums,
    constants,  # of the values' coder
    head,
    out,
    parts,
    i,  # [ROWS], queries of the group
    VALUE: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """The output of some queries from the sums of all parts; those of the tier are rotated back."""
    DIM: tl.constexpr = VALUE.dim
    VALUES: tl.constexpr = VALUE.padded
    GROUPS: tl.constexpr = SHAPE.groups
    ROWS: tl.constexpr = SHAPE.joined
    v, is_row, is_value = tl.arange(0, VALUES), i < GROUPS, tl.arange(0, VALUES) < DIM
    masses, values, near = sums + parts * GROUPS, sums + 2 * parts * GROUPS, (parts - 1) * GROUPS + i
    near_best = tl.load(sums + near, mask=is_row, other=0.0)
    best = near_best
    for part in range(0, parts - 1):
        best = tl.maximum(best, tl.load(sums + part * GROUPS + i, mask=is_row, other=0.0))
    is_output = is_row[:, None] & is_value[None, :]
    mass, merged = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, VALUES], tl.float32)
    for part in range(0, parts - 1):
        place = part * GROUPS + i
        share = tl.exp(tl.load(sums + place, mask=is_row, other=0.0) - best)
        mass += share * tl.load(masses + place, mask=is_row, other=0.0)
        merged += share[:, None] * tl.load(values + place[:, None] * DIM + v[None, :], mask=is_output, other=0.0)
    mean = tl.load(at(constants, VALUE.mean, tl.float32) + head * DIM + v, mask=is_value, other=0.0)
    total = mass[:, None] * mean[None, :]
    tl.debug_barrier()
    tl.store(values + i[:, None] * DIM + v[None, :], merged, mask=is_output)  # in the place of the first part's
    tl.debug_barrier()
    for begin in range(0, DIM, 16):
        n = begin + tl.arange(0, 16)
        rotated = tl.load(values + i[:, None] * DIM + n[None, :], mask=is_row[:, None] & (n < DIM)[None, :], other=0.0)
        back = at(constants, VALUE.back, tl.float32) + (head * DIM + v[None, :]) * DIM + n[:, None]
        columns = tl.load(back, mask=(n < DIM)[:, None] & is_value[None, :], other=0.0)
        total += tl.dot(rotated, columns, input_precision=PRECISION)
    share = tl.exp(near_best - best)
    mass += share * tl.load(masses + near, mask=is_row, other=0.0)
    total += share[:, None] * tl.load(values + near[:, None] * DIM + v[None, :], mask=is_output, other=0.0)
    total = total / tl.where(mass == 0.0, 1.0, mass)[:, None]  # who sees nothing gets zeros
    tl.store(out + i[:, None] * DIM + v[None, :], total.to(out.dtype.element_ty), mask=is_output)
