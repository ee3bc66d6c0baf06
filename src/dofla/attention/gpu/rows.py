"""The rows of bytes that a compressed cache is kept in (flat.py), as Triton kernels read and write them for a decoded
token. Importing this file needs triton.

Names in capitals are where parts begin in a row, and their sizes; NEAR is the window.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dofla.attention.constants import FREE, LOG_ZERO
from dofla.attention.gpu.numbers import at, packed, power_of_two

_NOTHING = tl.constexpr(LOG_ZERO)
_FREE = tl.constexpr(FREE)


@triton.jit
def line(
    before,  # [B, row]
    codes,  # [units, PLACES + 1, KEY_SIZE], to be filled up to the last place, as the three below
    scales,  # [units, PLACES + 1, KEY_BLOCKS]
    value_codes,  # [units, PLACES + 1, VALUE_SIZE]
    value_scales,  # [units, PLACES + 1, VALUE_BLOCKS]
    score,  # [units, PLACES + 1], to be filled
    log_weight,  # [units, PLACES + 1], to be filled
    row,
    heads,
    NEAR_WEIGHT: tl.constexpr,
    SINK_WEIGHT: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    VALUE_CODES: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
    SCORE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_BLOCKS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCKS: tl.constexpr,
    SINKS: tl.constexpr,
    PLACES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copy a tier, with one more slot for the token that leaves the window. One program per head of a batch row and
    some tokens."""
    unit = tl.program_id(0).to(tl.int64)
    head = unit % heads
    before += unit // heads * row
    t = tl.program_id(1) * TILE + tl.arange(0, TILE)
    here = t < PLACES
    held, place = head * PLACES + t, unit * (PLACES + 1) + t
    _moved(before + CODES, held, codes, place, here, KEY_SIZE)
    _moved(before + SCALES, held, scales, place, here, KEY_BLOCKS)
    _moved(before + VALUE_CODES, held, value_codes, place, here, VALUE_SIZE)
    _moved(before + VALUE_SCALES, held, value_scales, place, here, VALUE_BLOCKS)
    real, _, becomes_sink = _leaving(before, NEAR_WEIGHT, SINK_WEIGHT, SINKS)
    entering = tl.where(real > becomes_sink, 0, _FREE)
    drawn = tl.load(at(before, SCORE, tl.int16) + held, mask=here, other=0).to(tl.int32)
    drawn = tl.where(here, drawn, entering)
    tl.store(score + place, drawn.to(tl.int16), mask=t <= PLACES)
    tl.store(log_weight + place, tl.where(drawn == _FREE, _NOTHING, 0.0), mask=t <= PLACES)


@triton.jit
def near(
    query,  # [B, heads of the layer, 1, DIM]
    key,  # of the new token
    value,
    log_weight,  # [B], or None
    of_layer,  # [heads]
    before,  # [B, row]
    constants,  # of the values' coder
    seen,  # [units, groups, VALUE_DIM], of the tier, rotated
    normalizer,  # [units, groups]
    out,  # [B, heads of the layer, 1, VALUE_DIM], to be filled
    query_batch,
    query_head,
    key_batch,
    key_head,
    value_batch,
    value_head,
    out_batch,
    out_head,
    row,
    heads,
    groups,
    scaling,
    BACK: tl.constexpr,  # where the parts of the constants begin
    MEAN: tl.constexpr,
    NEAR_KEY: tl.constexpr,
    NEAR_KEY_UNIT: tl.constexpr,
    NEAR_VALUE: tl.constexpr,
    NEAR_VALUE_UNIT: tl.constexpr,
    NEAR_WEIGHT: tl.constexpr,
    SINK_KEY: tl.constexpr,
    SINK_KEY_UNIT: tl.constexpr,
    SINK_VALUE: tl.constexpr,
    SINK_VALUE_UNIT: tl.constexpr,
    SINK_WEIGHT: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Attention to window, sinks and the token itself, beside that to the tier. One program per query."""
    place = tl.program_id(0).to(tl.int64)
    unit = place // groups
    batch, head = unit // heads, unit % heads
    own = tl.load(of_layer + head).to(tl.int64)
    query_index = own * groups + place % groups
    before += batch * row
    d, v = tl.arange(0, triton.next_power_of_2(DIM)), tl.arange(0, triton.next_power_of_2(VALUE_DIM))
    is_number, is_value = d < DIM, v < VALUE_DIM
    asked = tl.load(query + batch * query_batch + query_index * query_head + d, mask=is_number, other=0.0).to(
        tl.float32
    )

    # What the tier answers, rotated back; who sees nothing there has its normalizer at _NOTHING.
    total = tl.load(at(constants, MEAN, tl.float32) + head * VALUE_DIM + v, mask=is_value, other=0.0)
    back = at(constants, BACK, tl.float32) + (head * VALUE_DIM + v) * VALUE_DIM
    for begin in range(0, VALUE_DIM, 8):
        i = begin + tl.arange(0, 8)
        piece = tl.load(seen + place * VALUE_DIM + i)
        columns = tl.load(back[:, None] + i[None, :], mask=is_value[:, None], other=0.0)
        total += tl.sum(columns * piece[None, :], axis=1)
    best = tl.load(normalizer + place)
    mass = tl.where(best > _NOTHING, 1.0, 0.0)
    total *= mass

    # The token itself, as it is kept.
    counts, weight = _weight_of(log_weight, batch)
    new, exponent = _as_kept(key + batch * key_batch + own * key_head, counts, DIM)
    score = tl.sum(new * power_of_two(exponent) * asked, axis=0) * scaling + weight
    score = tl.where(counts > 0, score, float("-inf"))
    new, exponent = _as_kept(value + batch * value_batch + own * value_head, counts, VALUE_DIM)
    top = tl.maximum(best, score)
    left, share = tl.exp(best - top), tl.exp(score - top)
    total = left * total + share * new * power_of_two(exponent)
    mass = left * mass + share
    best = top

    _, _, becomes_sink = _leaving(before, NEAR_WEIGHT, SINK_WEIGHT, SINKS)
    for begin in range(0, WINDOW, TILE):  # of whose tokens the first leaves, unless it becomes a sink
        t = begin + tl.arange(0, TILE)
        here = (t < WINDOW) & (t >= 1 - becomes_sink)
        best, mass, total = _seen(
            asked,
            before + NEAR_KEY,
            before + NEAR_KEY_UNIT,
            before + NEAR_VALUE,
            before + NEAR_VALUE_UNIT,
            before + NEAR_WEIGHT,
            head * WINDOW,
            t,
            here,
            scaling,
            best,
            mass,
            total,
            DIM,
            VALUE_DIM,
        )
    if SINKS > 0:
        t = tl.arange(0, triton.next_power_of_2(SINKS))
        best, mass, total = _seen(
            asked,
            before + SINK_KEY,
            before + SINK_KEY_UNIT,
            before + SINK_VALUE,
            before + SINK_VALUE_UNIT,
            before + SINK_WEIGHT,
            head * SINKS,
            t,
            t < SINKS,
            scaling,
            best,
            mass,
            total,
            DIM,
            VALUE_DIM,
        )
    total = total / tl.where(mass == 0.0, 1.0, mass)  # who sees nothing gets zeros
    place = out + batch * out_batch + query_index * out_head + v
    tl.store(place, total.to(out.dtype.element_ty), mask=is_value)


@triton.jit
def _seen(
    asked,
    key,
    key_unit,
    value,
    value_unit,
    log_weight,
    first,
    t,
    here,
    scaling,
    best,
    mass,
    total,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Attend with a query to some tokens in int8, as one step of an online softmax; ``first`` is the index of the
    head's first token. Returns the new ``best``, ``mass`` and ``total``."""
    d, v = tl.arange(0, triton.next_power_of_2(DIM)), tl.arange(0, triton.next_power_of_2(VALUE_DIM))
    weight = tl.load(at(log_weight, 0, tl.float32) + t, mask=here, other=_NOTHING)
    here = here & (weight > _NOTHING)
    unit = tl.load(at(key_unit, 0, tl.int8) + first + t, mask=here, other=0).to(tl.int32)
    numbers = at(key, 0, tl.int8) + (first + t)[:, None] * DIM + d[None, :]
    keys = tl.load(numbers, mask=here[:, None] & (d < DIM)[None, :], other=0).to(tl.float32)
    scores = tl.sum(keys * asked[None, :], axis=1) * power_of_two(unit) * scaling + weight
    scores = tl.where(here, scores, float("-inf"))
    top = tl.maximum(best, tl.max(scores, axis=0))
    left, shares = tl.exp(best - top), tl.exp(scores - top)
    unit = tl.load(at(value_unit, 0, tl.int8) + first + t, mask=here, other=0).to(tl.int32)
    numbers = at(value, 0, tl.int8) + (first + t)[:, None] * VALUE_DIM + v[None, :]
    values = tl.load(numbers, mask=here[:, None] & (v < VALUE_DIM)[None, :], other=0).to(tl.float32)
    total = left * total + tl.sum((shares * power_of_two(unit))[:, None] * values, axis=0)
    return top, left * mass + tl.sum(shares, axis=0), total


@triton.jit
def write(
    key,  # of the new token
    value,
    log_weight,  # [B], or None
    of_layer,  # [heads]
    before,  # [B, row]
    codes,  # of the line
    scales,
    value_codes,
    value_scales,
    index,  # [units, PLACES], places in the line of the tokens that stay
    stays,  # [units, PLACES], their scores
    after,  # [B, row], to be filled
    key_batch,
    key_head,
    value_batch,
    value_head,
    row,
    heads,
    NEAR_KEY: tl.constexpr,
    NEAR_KEY_UNIT: tl.constexpr,
    NEAR_VALUE: tl.constexpr,
    NEAR_VALUE_UNIT: tl.constexpr,
    NEAR_WEIGHT: tl.constexpr,
    SINK_KEY: tl.constexpr,
    SINK_KEY_UNIT: tl.constexpr,
    SINK_VALUE: tl.constexpr,
    SINK_VALUE_UNIT: tl.constexpr,
    SINK_WEIGHT: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    VALUE_CODES: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
    SCORE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_BLOCKS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCKS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PLACES: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """One program per head of a batch row and some tokens."""
    unit = tl.program_id(0).to(tl.int64)
    batch, head = unit // heads, unit % heads
    before += batch * row
    after += batch * row
    t = tl.program_id(1) * TILE + tl.arange(0, TILE)

    here = t < PLACES
    source = unit * (PLACES + 1) + tl.load(index + unit * PLACES + t, mask=here, other=0)
    place = head * PLACES + t
    _moved(codes, source, after + CODES, place, here, KEY_SIZE)
    _moved(scales, source, after + SCALES, place, here, KEY_BLOCKS)
    _moved(value_codes, source, after + VALUE_CODES, place, here, VALUE_SIZE)
    _moved(value_scales, source, after + VALUE_SCALES, place, here, VALUE_BLOCKS)
    drawn = tl.load(stays + unit * PLACES + t, mask=here, other=0)
    tl.store(at(after, SCORE, tl.int16) + place, drawn, mask=here)

    here, place = t < WINDOW - 1, head * WINDOW + t
    _moved(before + NEAR_KEY, place + 1, after + NEAR_KEY, place, here, DIM)
    _moved(before + NEAR_KEY_UNIT, place + 1, after + NEAR_KEY_UNIT, place, here, 1)
    _moved(before + NEAR_VALUE, place + 1, after + NEAR_VALUE, place, here, VALUE_DIM)
    _moved(before + NEAR_VALUE_UNIT, place + 1, after + NEAR_VALUE_UNIT, place, here, 1)
    _, held, becomes_sink = _leaving(before, NEAR_WEIGHT, SINK_WEIGHT, SINKS)
    if head == 0:
        weight = tl.load(at(before, NEAR_WEIGHT, tl.float32) + t + 1, mask=here, other=0.0)
        tl.store(at(after, NEAR_WEIGHT, tl.float32) + t, weight, mask=here)
    if tl.program_id(1) == 0:
        counts, weight = _weight_of(log_weight, batch)
        own, last = tl.load(of_layer + head).to(tl.int64), head * WINDOW + WINDOW - 1
        _stored(key + batch * key_batch + own * key_head, counts, after + NEAR_KEY, after + NEAR_KEY_UNIT, last, DIM)
        value += batch * value_batch + own * value_head
        _stored(value, counts, after + NEAR_VALUE, after + NEAR_VALUE_UNIT, last, VALUE_DIM)
        if head == 0:
            tl.store(at(after, NEAR_WEIGHT, tl.float32) + WINDOW - 1, weight)

    if SINKS > 0:
        here, place = t < SINKS, head * SINKS + t
        comes = here & (t == held) & (t < held + becomes_sink)
        old, first = here & (comes == 0), head * WINDOW + tl.zeros_like(t)
        _moved(before + SINK_KEY, place, after + SINK_KEY, place, old, DIM)
        _moved(before + SINK_KEY_UNIT, place, after + SINK_KEY_UNIT, place, old, 1)
        _moved(before + SINK_VALUE, place, after + SINK_VALUE, place, old, VALUE_DIM)
        _moved(before + SINK_VALUE_UNIT, place, after + SINK_VALUE_UNIT, place, old, 1)
        _moved(before + NEAR_KEY, first, after + SINK_KEY, place, comes, DIM)
        _moved(before + NEAR_KEY_UNIT, first, after + SINK_KEY_UNIT, place, comes, 1)
        _moved(before + NEAR_VALUE, first, after + SINK_VALUE, place, comes, VALUE_DIM)
        _moved(before + NEAR_VALUE_UNIT, first, after + SINK_VALUE_UNIT, place, comes, 1)
        if head == 0:
            weight = tl.load(at(before, SINK_WEIGHT, tl.float32) + t, mask=old, other=0.0)
            weight = tl.where(comes, tl.load(at(before, NEAR_WEIGHT, tl.float32)), weight)
            tl.store(at(after, SINK_WEIGHT, tl.float32) + t, weight, mask=here)


@triton.jit
def _moved(source, places, target, to, here, SIZE: tl.constexpr):
    """Bytes of tokens at ``places`` [T], so many of each, to the places ``to``."""
    n = tl.arange(0, triton.next_power_of_2(SIZE))
    own = here[:, None] & (n < SIZE)[None, :]
    bytes = tl.load(source + places[:, None] * SIZE + n[None, :], mask=own, other=0)
    tl.store(target + to[:, None] * SIZE + n[None, :], bytes, mask=own)


@triton.jit
def _as_kept(x, counts, SIZE: tl.constexpr):
    """A vector in int8, integers and their exponent; zeros where it does not count."""
    n = tl.arange(0, triton.next_power_of_2(SIZE))
    return packed(tl.load(x + n, mask=n < SIZE, other=0.0).to(tl.float32) * counts)


@triton.jit
def _stored(x, counts, integers, exponents, place, SIZE: tl.constexpr):
    """A vector of the new token, as it is kept, to a place."""
    n = tl.arange(0, triton.next_power_of_2(SIZE))
    numbers, exponent = _as_kept(x, counts, SIZE)
    tl.store(at(integers, 0, tl.int8) + place * SIZE + n, numbers.to(tl.int8), mask=n < SIZE)
    tl.store(at(exponents, 0, tl.int8) + place, exponent.to(tl.int8))


@triton.jit
def _weight_of(log_weight, batch):
    """True if the new token counts, 1.0 or 0.0, and the logarithm of its weight."""
    weight = 0.0
    if log_weight is not None:
        weight = tl.load(log_weight + batch)
    counts = tl.where(weight > _NOTHING, 1.0, 0.0)
    return counts, weight


@triton.jit
def _leaving(before, NEAR_WEIGHT: tl.constexpr, SINK_WEIGHT: tl.constexpr, SINKS: tl.constexpr):
    """Three integers about the token that leaves the window: 1 if it is real and no padding, the number of sinks
    before it, and 1 if it becomes the next sink."""
    real = (tl.load(at(before, NEAR_WEIGHT, tl.float32)) > _NOTHING).to(tl.int32)
    held = 0 * real
    if SINKS > 0:
        t = tl.arange(0, triton.next_power_of_2(SINKS))
        weight = tl.load(at(before, SINK_WEIGHT, tl.float32) + t, mask=t < SINKS, other=_NOTHING)
        held = tl.sum((weight > _NOTHING).to(tl.int32), axis=0)
    return real, held, real * (held < SINKS).to(tl.int32)
