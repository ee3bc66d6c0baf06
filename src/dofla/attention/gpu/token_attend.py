"""The second of three kernels of a decoded token: attention.

Programs share the tokens of a head between them, and each leaves the weighted sum of its part behind.

Keys and values are integers below 2⁷ times units, so they are exact in float16. Queries and weights are float32: each,
by a power of two, is the sum of two numbers in float16, up to 2⁻²². A product of matrices on the matrix units of a GPU
takes 16 rows, and a KV head has few queries. So the summands of each query are rows of one product, and its integers,
which give the scores that evict (heavy_hitters.py), are another.
"""

import triton
import triton.language as tl

from dofla.attention.gpu import rows
from dofla.attention.gpu.decode import LEAST, integers_of, keys_of, starts_of, units_of
from dofla.attention.gpu.heavy_hitters import weight_step
from dofla.attention.gpu.numbers import at, exponent_of, power_of_two

SUMMANDS = tl.constexpr(4)
"""Rows of a product for each query: its integers, the two numbers whose sum it is, and one that is not used."""


@triton.jit
def attend(
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
    scratch,  # [units, bytes], as the first kernel left it
    query_batch,
    query_head,
    key_batch,
    key_head,
    value_batch,
    value_head,
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
    DIM: tl.constexpr = VALUE.dim
    VALUES: tl.constexpr = VALUE.padded
    unit, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    batch, head = unit // heads, unit % heads
    own, state = rows.described(descriptions, head), rows.row_of(states, pages, batch, row)
    scratch += unit * SHAPE.scratch
    sums = at(scratch, SHAPE.sums, tl.float32)
    i, v = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, VALUES)
    best = tl.full([ROWS], rows.NOTHING, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, VALUES], tl.float32)
    if part < parts - 1:
        slots = rows.number(own, rows.SLOTS).to(tl.int32)
        key_bits = at(key_constants, KEY.bits, tl.uint8) + head * KEY.blocks
        value_bits = at(value_constants, VALUE.bits, tl.uint8) + head * VALUE.blocks
        each = tl.cdiv(slots + 1, parts - 1)
        best, mass, total = _see_tier(
            *(state, own, slots, part * each, tl.minimum((part + 1) * each, slots + 1)),
            *(key_bits, value_bits, tables, scratch, i, scaling, per_step, best, mass, total, KEY, VALUE, SHAPE),
        )
    else:
        kv_head = rows.number(own, rows.HEAD)
        query += batch * query_batch + kv_head * GROUPS * query_head
        best, mass, total = _see_near(
            *(query, query_head, key + batch * key_batch + kv_head * key_head),
            *(value + batch * value_batch + kv_head * value_head, log_weight, batch, state, own),
            *(at(scratch, SHAPE.weights, tl.float32), i, scaling, best, mass, total, KEY, VALUE, SHAPE),
        )
    place = part * GROUPS + i
    tl.store(sums + place, best, mask=i < GROUPS)
    tl.store(sums + parts * GROUPS + place, mass, mask=i < GROUPS)
    values = sums + 2 * parts * GROUPS + place[:, None] * DIM + v[None, :]
    tl.store(values, total, mask=(i < GROUPS)[:, None] & (v < DIM)[None, :])


@triton.jit
def _see_tier(
    state,
    own,
    slots,
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
    """Attend to tokens of the tier, and write the steps of their weights (heavy_hitters.py), unless none is evicted.
    The token that enters stands in the scratch, behind those of the state."""
    DIM: tl.constexpr = KEY.dim
    BLOCK: tl.constexpr = KEY.block
    BLOCKS: tl.constexpr = KEY.blocks
    GROUPS: tl.constexpr = SHAPE.groups
    TILE: tl.constexpr = SHAPE.tile
    ROWS: tl.constexpr = SHAPE.rows
    k, v, is_row = tl.arange(0, LEAST), tl.arange(0, VALUE.padded), i < GROUPS
    key_codes, key_scales, value_codes, value_scales = rows.vectors_of(state, own, rows.TIER)
    entering = scratch + SHAPE.entering
    entering_value = entering + (KEY.size + BLOCKS)
    queries, steps = at(scratch, SHAPE.queries, tl.float32), at(scratch, SHAPE.steps, tl.float32)
    beside = tl.load(queries + i * (DIM + 1) + DIM, mask=is_row, other=0.0)
    evicted, grows = tl.load(at(scratch, SHAPE.evicted, tl.int32)), rows.number(own, rows.GROWS)
    before, bits_of_values = starts_of(v, value_bits, VALUE)
    # Row r of a product is summand r // ROWS of a query.
    r = tl.arange(0, SUMMANDS * ROWS)
    summand, asks = r // ROWS, tl.program_id(2) * ROWS + r % ROWS
    here = ((asks < GROUPS) & (summand < 3))[:, None] & (k < BLOCK)[None, :]
    asked = at(scratch, SHAPE.asked, tl.float16) + (summand * GROUPS + asks) * DIM
    units = queries + GROUPS * (2 * DIM + 1) + asks * BLOCKS
    for begin in range(first, end, TILE):
        t = begin + tl.arange(0, TILE)
        is_token, enters = t < end, t == slots
        codes = tl.where(enters, entering, key_codes + t * KEY.size)
        scales = tl.where(enters, entering + KEY.size, key_scales + t * BLOCKS)
        products = tl.zeros([SUMMANDS * ROWS, TILE], tl.float32)
        for block in range(0, BLOCKS):
            bits = tl.load(key_bits + block).to(tl.int32)
            keys = keys_of(codes, bits, tables, is_token, BLOCK)
            unit = tl.load(units + block, mask=asks < GROUPS, other=0.0)[:, None]
            factor = tl.load(asked[:, None] + (block * BLOCK + k)[None, :], mask=here, other=0.0)
            found = tl.dot(factor, keys.to(tl.float16)) * unit
            products += found * units_of(scales + block, tables, is_token)[None, :]
            codes += bits * (BLOCK // 8)
        if grows == 0:
            own_steps = steps + asks[:, None] * (SHAPE.places + 1) + t[None, :]
            stored = ((summand == 0) & (asks < GROUPS))[:, None] & is_token[None, :]
            tl.store(own_steps, weight_step(products, per_step), mask=stored)
        score = rows.scores_of(state, own, t, t < slots)
        seen = is_token & (t != evicted) & (score >= 0)
        scores = tl.where(seen[None, :], (_joined(products, ROWS) + beside[:, None]) * scaling, float("-inf"))
        codes = tl.where(enters, entering_value, value_codes + t * VALUE.size)
        scales = tl.where(enters, entering_value + VALUE.size, value_scales + t * VALUE.blocks)
        values, value_units = integers_of(codes, scales, v, before, bits_of_values, tables, is_token, VALUE)
        best, mass, total = _attended(best, mass, total, scores, values, value_units, VALUE.padded // VALUE.block)
    return best, mass, total


@triton.jit
def _summand_of(x, is_rest):
    """Numbers in float16; or what these leave of them."""
    near = x.to(tl.float16)
    return tl.where(is_rest, (x - near.to(tl.float32)).to(tl.float16), near)


@triton.jit
def _joined(products, ROWS: tl.constexpr):
    """The products [ROWS, N] of queries from those of their summands [SUMMANDS * ROWS, N]."""
    summand = tl.arange(0, SUMMANDS)[:, None, None]
    found = tl.reshape(products, [SUMMANDS, ROWS, products.shape[1]])
    return tl.sum(tl.where((summand == 1) | (summand == 2), found, 0.0), axis=0)


@triton.jit
def _shares(best, scores):
    """The largest score so far [R], the weights of tokens with ``scores`` [R, T], and by what earlier ones are less."""
    top = tl.maximum(best, tl.max(scores, axis=1))
    return top, tl.exp(scores - top[:, None]), tl.exp(best - top)


@triton.jit
def _attended(best, mass, total, scores, integers, units, BLOCKS: tl.constexpr):
    """The largest score [R], the sum of weights [R] and the weighted sum of values [R, N], with those of further
    tokens, whose scores are [R, T] and values as for :func:`_weighted`."""
    best, share, left = _shares(best, scores)
    return best, left * mass + tl.sum(share, axis=1), left[:, None] * total + _weighted(share, integers, units, BLOCKS)


@triton.jit
def _weighted(shares, integers, units, BLOCKS: tl.constexpr):
    """Sums [R, N] over tokens, with weights [R, T], of vectors of ``integers`` [T, N] times the ``units`` of their
    blocks [T, BLOCKS]."""
    ROWS: tl.constexpr = shares.shape[0]
    TOKENS: tl.constexpr = integers.shape[0]
    NUMBERS: tl.constexpr = integers.shape[1]
    BLOCK: tl.constexpr = NUMBERS // BLOCKS
    exponent = exponent_of(tl.max(units, axis=0))  # of numbers that are not above 1 then
    exponent = tl.minimum(tl.maximum(exponent, -100), 100)
    units = tl.trans(units * power_of_two(-exponent)[None, :])
    x = shares[None, :, :] * units[:, None, :]
    rest = (tl.arange(0, 2) == 1)[None, :, None, None]
    x = tl.reshape(_summand_of(x[:, None], rest), [BLOCKS, 2 * ROWS, TOKENS])
    blocks = tl.permute(tl.reshape(integers.to(tl.float16), [TOKENS, BLOCKS, BLOCK]), (1, 0, 2))
    found = tl.sum(tl.reshape(tl.dot(x, blocks), [BLOCKS, 2, ROWS, BLOCK]), axis=1)
    found *= power_of_two(exponent)[:, None, None]
    return tl.reshape(tl.permute(found, (1, 0, 2)), [ROWS, NUMBERS])


@triton.jit
def _see_near(
    query,  # of the first head of the group
    query_head,
    key,  # of the new token
    value,
    log_weight,
    batch,
    state,
    own,
    weights,  # of window and sinks
    i,  # [ROWS], queries of the group
    scaling,
    best,
    mass,
    total,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Attend to the window, to the sinks, and to the new token."""
    GROUPS: tl.constexpr = SHAPE.groups
    ROWS: tl.constexpr = SHAPE.rows
    d, r = tl.arange(0, KEY.padded), tl.arange(0, SUMMANDS * ROWS)
    asks = tl.program_id(2) * ROWS + r % ROWS
    here = (asks < GROUPS)[:, None] & (d < KEY.dim)[None, :]
    asked = tl.load(query + asks[:, None] * query_head + d[None, :], mask=here, other=0.0).to(tl.float32)
    exponent = exponent_of(tl.max(tl.abs(asked), axis=1))
    exponent = tl.minimum(tl.maximum(exponent, -100), 100)
    asked = _summand_of(asked * power_of_two(-exponent)[:, None], (r // ROWS == 2)[:, None])
    unit = power_of_two(exponent) * scaling
    _, _, becomes_sink = rows.leaving_window(weights, SHAPE)
    best, mass, total = _see(  # the window, whose first token leaves, unless it becomes a sink
        *(asked, unit, state, own, rows.WINDOW, weights, 1 - becomes_sink, SHAPE.window),
        *(best, mass, total, KEY, VALUE, SHAPE),
    )
    best, mass, total = _see(
        *(asked, unit, state, own, rows.SINKS, weights + SHAPE.window, 0, SHAPE.sinks),
        *(best, mass, total, KEY, VALUE, SHAPE),
    )
    counts, weight = rows.weight_of(log_weight, batch)
    here = (i < GROUPS)[:, None] & (d < KEY.dim)[None, :]
    asked = tl.load(query + i[:, None] * query_head + d[None, :], mask=here, other=0.0).to(tl.float32)
    new, exponent = rows.as_kept(key, counts, KEY)
    scores = tl.sum(asked * new[None, :], axis=1) * power_of_two(exponent) * scaling + weight
    new, exponent = rows.as_kept(value, counts, VALUE)
    best, share, left = _shares(best, tl.where(counts > 0, scores, float("-inf"))[:, None])
    total = left[:, None] * total + share * (new * power_of_two(exponent))[None, :]
    return best, left * mass + tl.sum(share, axis=1), total


@triton.jit
def _see(
    asked,  # [SUMMANDS * ROWS, d]
    unit,  # [SUMMANDS * ROWS], of their products
    state,
    own,
    TOKENS: tl.constexpr,
    weights,
    first,
    COUNT: tl.constexpr,
    best,
    mass,
    total,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Attend to tokens in int8, of ``COUNT`` those from the ``first`` on."""
    ROWS: tl.constexpr = SHAPE.rows
    TILE: tl.constexpr = SHAPE.tile
    keys, key_units, values, value_units = rows.vectors_of(state, own, TOKENS)
    for begin in range(0, COUNT, TILE):
        t = begin + tl.arange(0, TILE)
        here = (t < COUNT) & (t >= first)
        own_keys, key_unit = rows.in_int8(keys, key_units, t, here, KEY)
        own_values, value_unit = rows.in_int8(values, value_units, t, here, VALUE)
        weight = tl.load(weights + t, mask=here, other=rows.NOTHING)
        products = tl.dot(asked, tl.trans(own_keys.to(tl.float16))) * unit[:, None]
        scores = _joined(products, ROWS) * key_unit[None, :]
        scores = tl.where((weight > rows.NOTHING)[None, :], scores + weight[None, :], float("-inf"))
        best, mass, total = _attended(best, mass, total, scores, own_values, value_unit[:, None], 1)
    return best, mass, total
