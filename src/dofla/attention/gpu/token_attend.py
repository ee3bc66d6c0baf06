"""The second of two kernels of a decoded token: attention, and the states after it.

Programs share the tokens of a head between them, and each leaves the weighted sum of its part behind. The last to
arrive joins the sums and updates the state, in place, since all others have read it by then.
"""

import triton
import triton.language as tl

from dofla.attention.gpu import rows
from dofla.attention.gpu.decode import LEAST, keys_of, starts_of, units_of, values_of
from dofla.attention.gpu.heavy_hitters import drawn_by, lowest, weight_step
from dofla.attention.gpu.numbers import at, power_of_two
from dofla.attention.gpu.tier import PRECISION as _PRECISION
from dofla.attention.gpu.tier import online_softmax

PRECISION = tl.constexpr(_PRECISION)


@triton.jit
def attend_and_update(
    query,  # [B, heads of the layer, 1, d]
    key,  # of the new token
    value,
    log_weight,  # [B], or None
    states,  # rows of bytes
    pages,  # the row of each sequence [B], or None
    descriptions,  # of the heads
    key_constants,  # of the coders
    value_constants,
    tables,
    attention_weights,  # by steps
    scratch,  # [units, bytes], as the first kernel left it
    out,  # [B, heads of the layer, 1, dv], in one piece, to be filled
    query_batch,
    query_head,
    key_batch,
    key_head,
    value_batch,
    value_head,
    out_batch,
    row,
    heads,
    scaling,
    per_step,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """One program per head of a batch row, part of its tokens (the last: window, sinks, new token), queries."""
    GROUPS: tl.constexpr = SHAPE.groups
    ROWS: tl.constexpr = SHAPE.rows
    LANES: tl.constexpr = SHAPE.lanes
    PADDED: tl.constexpr = KEY.padded
    VALUES: tl.constexpr = VALUE.padded
    unit, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    batch, head = unit // heads, unit % heads
    own, state = rows.described(descriptions, head), rows.row_of(states, pages, batch, row)
    slots, kv_head = rows.number(own, rows.SLOTS).to(tl.int32), rows.number(own, rows.HEAD)
    key += batch * key_batch + kv_head * key_head
    value += batch * value_batch + kv_head * value_head
    scratch += unit * SHAPE.scratch
    weights, sums = at(scratch, SHAPE.weights, tl.float32), at(scratch, SHAPE.sums, tl.float32)
    counts, weight = rows.weight_of(log_weight, batch)
    lane = tl.arange(0, LANES)
    on_entry = rows.score_on_entry(weights, SHAPE)
    slot = tl.where(lane < slots, slots - 1 - lane, lane)  # lanes are tokens, the oldest first
    score = rows.scores_of(state, own, slots, on_entry, slot)
    may_go = (lane < slots) & ((lane <= slots - SHAPE.newest) | (score < 0))
    evicted = tl.where(on_entry < 0, slots, slots - 1 - lowest(score, may_go, LANES))

    i = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    best = tl.full([ROWS], rows.NOTHING, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, VALUES], tl.float32)
    if part < parts - 1:
        key_bits = at(key_constants, KEY.bits, tl.uint8) + head * KEY.blocks
        value_bits = at(value_constants, VALUE.bits, tl.uint8) + head * VALUE.blocks
        each = tl.cdiv(slots + 1, parts - 1)
        best, mass, total = _see_tier(
            *(state, own, slots, evicted, on_entry, part * each, tl.minimum((part + 1) * each, slots + 1)),
            *(key_bits, value_bits, tables, scratch, i, scaling, per_step, best, mass, total, KEY, VALUE, SHAPE),
        )
    else:
        query += batch * query_batch + kv_head * GROUPS * query_head
        d = tl.arange(0, PADDED)
        in_query = (i < GROUPS)[:, None] & (d < KEY.dim)[None, :]
        asked = tl.load(query + i[:, None] * query_head + d[None, :], mask=in_query, other=0.0).to(tl.float32)
        _, _, becomes_sink = rows.leaving_window(weights, SHAPE)
        best, mass, total = _see(  # the window, whose first token leaves, unless it becomes a sink
            *(asked, state, own, rows.WINDOW, weights, 1 - becomes_sink, SHAPE.window),
            *(scaling, best, mass, total, KEY, VALUE, SHAPE),
        )
        best, mass, total = _see(
            *(asked, state, own, rows.SINKS, weights + SHAPE.window, 0, SHAPE.sinks),
            *(scaling, best, mass, total, KEY, VALUE, SHAPE),
        )
        new, exponent = rows.as_kept(key, counts, KEY)
        scores = tl.sum(asked * new[None, :], axis=1) * power_of_two(exponent) * scaling + weight
        new, exponent = rows.as_kept(value, counts, VALUE)
        # As a token of its own, without the matrix product of online_softmax.
        scores = tl.where(counts > 0, scores, float("-inf"))
        top = tl.maximum(best, scores)
        left, share = tl.exp(best - top), tl.exp(scores - top)
        total = left[:, None] * total + share[:, None] * (new * power_of_two(exponent))[None, :]
        best, mass = top, left * mass + share
    place, v = part * GROUPS + i, tl.arange(0, VALUES)
    tl.store(sums + place, best, mask=i < GROUPS)
    tl.store(sums + parts * GROUPS + place, mass, mask=i < GROUPS)
    values = sums + 2 * parts * GROUPS + place[:, None] * VALUE.dim + v[None, :]
    tl.store(values, total, mask=(i < GROUPS)[:, None] & (v < VALUE.dim)[None, :])
    tl.debug_barrier()  # all of the program has been stored before it arrives
    arrived = tl.atomic_add(at(scratch, SHAPE.arrived, tl.int32), 1)
    if arrived == parts * tl.num_programs(2) - 1:
        out += batch * out_batch + kv_head * GROUPS * VALUE.dim
        for first in range(0, GROUPS, ROWS):
            _join(sums, value_constants, head, out, parts, first + tl.arange(0, ROWS), VALUE, SHAPE)
        there = (lane <= slots) & (slot != evicted)
        enters = tl.where(tl.min(tl.where(lane <= slots, score, 0), axis=0) < 0, evicted, 0)
        g = tl.arange(0, triton.next_power_of_2(GROUPS))
        steps = at(scratch, SHAPE.steps, tl.float32) + g[:, None] * (SHAPE.places + 1) + slot[None, :]
        if (counts > 0) & (rows.number(own, rows.GROWS) == 0):  # a query that is padding draws nothing
            score = drawn_by(steps, g < GROUPS, score, there & (score >= 0), attention_weights)
        after = tl.where(slot == slots, enters, slot + ((slot >= enters) & (slot < evicted)).to(tl.int32))
        tl.debug_barrier()  # all have loaded what others overwrite
        tl.store(rows.tier_scores(state, own) + after, score.to(tl.int16), mask=there)
        rows.update_tier(state, own, slots, enters, evicted, scratch + SHAPE.entering, KEY, VALUE, SHAPE)
        rows.update_window(state, own, key, value, weight, weights, KEY, VALUE, SHAPE)


@triton.jit
def _see_tier(
    state,
    own,
    slots,
    evicted,
    on_entry,  # score of the token that enters
    first,  # of the part's tokens
    end,
    key_bits,
    value_bits,
    tables,
    scratch,
    i,  # [ROWS], queries of the group
    scaling,
    per_step,
    best,
    mass,
    total,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Attend to tokens of the tier, and write the steps of their weights (heavy_hitters.py). The token that enters
    stands in the scratch, behind those of the state."""
    DIM: tl.constexpr = KEY.dim
    BLOCK: tl.constexpr = KEY.block
    BLOCKS: tl.constexpr = KEY.blocks
    GROUPS: tl.constexpr = SHAPE.groups
    TILE: tl.constexpr = SHAPE.tile
    ROWS: tl.constexpr = SHAPE.rows
    VALUES: tl.constexpr = VALUE.padded
    k, v, is_row = tl.arange(0, LEAST), tl.arange(0, VALUES), i < GROUPS
    here = is_row[:, None] & (k < BLOCK)[None, :]
    key_codes, key_scales, value_codes, value_scales = rows.vectors_of(state, own, rows.TIER)
    entering = scratch + SHAPE.entering
    entering_value = entering + (KEY.size + BLOCKS)
    queries, steps = at(scratch, SHAPE.queries, tl.float32), at(scratch, SHAPE.steps, tl.float32)
    rotated, numbers = queries + i * (DIM + 1), queries + GROUPS * (DIM + 1) + i * DIM
    units = queries + GROUPS * (2 * DIM + 1) + i * BLOCKS
    beside = tl.load(rotated + DIM, mask=is_row, other=0.0)
    before, bits_of_values = starts_of(v, value_bits, VALUE)
    for begin in range(first, end, TILE):
        t = begin + tl.arange(0, TILE)
        is_token, enters = t < end, t == slots
        codes = tl.where(enters, entering, key_codes + t * KEY.size)
        scales = tl.where(enters, entering + KEY.size, key_scales + t * BLOCKS)
        scores = tl.zeros([ROWS, TILE], tl.float32)
        logarithms = tl.zeros([ROWS, TILE], tl.float32)
        for block in range(0, BLOCKS):
            bits = tl.load(key_bits + block).to(tl.int32)
            keys = keys_of(codes, bits, tables, is_token, BLOCK)
            key_unit = units_of(scales + block, tables, is_token)[None, :]
            place = (block * BLOCK + k)[None, :]
            asked = tl.load(rotated[:, None] + place, mask=here, other=0.0)
            scores += tl.dot(asked, keys, input_precision=PRECISION) * key_unit
            asked = tl.load(numbers[:, None] + place, mask=here, other=0.0).to(tl.float16)
            found = tl.dot(asked, keys.to(tl.float16)) * tl.load(units + block, mask=is_row, other=0.0)[:, None]
            logarithms += found * key_unit
            codes += bits * (BLOCK // 8)
        own_steps = steps + i[:, None] * (SHAPE.places + 1) + t[None, :]
        tl.store(own_steps, weight_step(logarithms, per_step), mask=is_row[:, None] & is_token[None, :])
        seen = is_token & (t != evicted) & (rows.scores_of(state, own, slots, on_entry, t) >= 0)
        scores = tl.where(seen[None, :], (scores + beside[:, None]) * scaling, float("-inf"))
        codes = tl.where(enters, entering_value, value_codes + t * VALUE.size)
        scales = tl.where(enters, entering_value + VALUE.size, value_scales + t * VALUE.blocks)
        values = values_of(codes, scales, v, before, bits_of_values, tables, is_token, VALUE)
        best, mass, total = online_softmax(best, mass, total, scores, values)
    return best, mass, total


@triton.jit
def _see(
    asked,
    state,
    own,
    TOKENS: tl.constexpr,
    weights,
    first,
    COUNT: tl.constexpr,
    scaling,
    best,
    mass,
    total,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Attend to tokens in int8, of ``COUNT`` those from the ``first`` on."""
    TILE: tl.constexpr = SHAPE.tile
    keys, key_units, values, value_units = rows.vectors_of(state, own, TOKENS)
    for begin in range(0, COUNT, TILE):
        t = begin + tl.arange(0, TILE)
        here = (t < COUNT) & (t >= first)
        own_keys, key_unit = rows.in_int8(keys, key_units, t, here, KEY)
        own_values, value_unit = rows.in_int8(values, value_units, t, here, VALUE)
        weight = tl.load(weights + t, mask=here, other=rows.NOTHING)
        scores = tl.dot(asked, tl.trans(own_keys), input_precision=PRECISION) * (key_unit * scaling)[None, :]
        scores = tl.where((weight > rows.NOTHING)[None, :], scores + weight[None, :], float("-inf"))
        best, mass, total = online_softmax(best, mass, total, scores, own_values * value_unit[:, None])
    return best, mass, total


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
    ROWS: tl.constexpr = SHAPE.rows
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
