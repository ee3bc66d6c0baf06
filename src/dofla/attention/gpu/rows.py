"""The rows of bytes that a compressed cache is kept in (flat.py), as Triton kernels read and write them for a decoded
token. Importing this file needs triton.

Where the parts of a head begin in a row, its description says (side_by_side.py); NEAR is the window.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dofla.attention.constants import FREE, LOG_ZERO
from dofla.attention.gpu.numbers import at, packed, power_of_two
from dofla.attention.gpu.side_by_side import (
    CODES,
    FIRST,
    NEAR_KEY,
    NEAR_KEY_UNIT,
    NEAR_VALUE,
    NEAR_VALUE_UNIT,
    NEAR_WEIGHT,
    OF_LAYER,
    SCALES,
    SCORE,
    SINK_KEY,
    SINK_KEY_UNIT,
    SINK_VALUE,
    SINK_VALUE_UNIT,
    SINK_WEIGHT,
    SLOTS,
    VALUE_CODES,
    VALUE_SCALES,
    described,
    number,
)

_NOTHING = tl.constexpr(LOG_ZERO)
_FREE = tl.constexpr(FREE)


@triton.jit
def line(
    before,  # [B, row]
    descriptions,  # of the heads
    codes,  # [units, places + 1, KEY_SIZE], to be filled up to the last place, as the three below
    scales,  # [units, places + 1, KEY_BLOCKS]
    value_codes,  # [units, places + 1, VALUE_SIZE]
    value_scales,  # [units, places + 1, VALUE_BLOCKS]
    score,  # [units, places + 1], to be filled, as all below
    log_weight,  # [units, places + 1]
    leaving_key,  # [units, DIM]
    leaving_key_unit,  # [units]
    leaving_value,  # [units, VALUE_DIM]
    leaving_value_unit,  # [units]
    row,
    heads,
    places,
    KEY_SIZE: tl.constexpr,
    KEY_BLOCKS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCKS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SINKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copy tiers, with one more slot for the token that leaves the window, and free slots in front of those that are
    smaller than others; and that token. One program per head of a batch row and some tokens."""
    unit = tl.program_id(0).to(tl.int64)
    own = described(descriptions, unit % heads)
    before += unit // heads * row
    t = tl.program_id(1) * TILE + tl.arange(0, TILE)
    held = t - (places - number(own, SLOTS))
    here, place = (held >= 0) & (t < places), unit * (places + 1) + t
    _moved(before + number(own, CODES), held, codes, place, here, KEY_SIZE)
    _moved(before + number(own, SCALES), held, scales, place, here, KEY_BLOCKS)
    _moved(before + number(own, VALUE_CODES), held, value_codes, place, here, VALUE_SIZE)
    _moved(before + number(own, VALUE_SCALES), held, value_scales, place, here, VALUE_BLOCKS)
    real, _, becomes_sink = _leaving(before, own, SINKS)
    entering = tl.where((t == places) & (real > becomes_sink), 0, _FREE)
    drawn = tl.load(at(before + number(own, SCORE), 0, tl.int16) + held, mask=here, other=0).to(tl.int32)
    drawn = tl.where(here, drawn, entering)
    tl.store(score + place, drawn.to(tl.int16), mask=t <= places)
    tl.store(log_weight + place, tl.where(drawn == _FREE, _NOTHING, 0.0), mask=t <= places)
    if tl.program_id(1) == 0:
        only, first = tl.zeros([1], tl.int32) == 0, tl.zeros([1], tl.int64)
        _moved(before + number(own, NEAR_KEY), first, leaving_key, first + unit, only, DIM)
        _moved(before + number(own, NEAR_KEY_UNIT), first, leaving_key_unit, first + unit, only, 1)
        _moved(before + number(own, NEAR_VALUE), first, leaving_value, first + unit, only, VALUE_DIM)
        _moved(before + number(own, NEAR_VALUE_UNIT), first, leaving_value_unit, first + unit, only, 1)


@triton.jit
def near(
    query,  # [B, heads of the layer, 1, DIM]
    key,  # of the new token
    value,
    log_weight,  # [B], or None
    descriptions,  # of the heads
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
    own = described(descriptions, head)
    of_layer = number(own, OF_LAYER)
    query_index = of_layer * groups + place % groups
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
    new, exponent = _as_kept(key + batch * key_batch + of_layer * key_head, counts, DIM)
    score = tl.sum(new * power_of_two(exponent) * asked, axis=0) * scaling + weight
    score = tl.where(counts > 0, score, float("-inf"))
    new, exponent = _as_kept(value + batch * value_batch + of_layer * value_head, counts, VALUE_DIM)
    top = tl.maximum(best, score)
    left, share = tl.exp(best - top), tl.exp(score - top)
    total = left * total + share * new * power_of_two(exponent)
    mass = left * mass + share
    best = top

    _, _, becomes_sink = _leaving(before, own, SINKS)
    for begin in range(0, WINDOW, TILE):  # of whose tokens the first leaves, unless it becomes a sink
        t = begin + tl.arange(0, TILE)
        here = (t < WINDOW) & (t >= 1 - becomes_sink)
        best, mass, total = _seen(
            asked,
            before + number(own, NEAR_KEY),
            before + number(own, NEAR_KEY_UNIT),
            before + number(own, NEAR_VALUE),
            before + number(own, NEAR_VALUE_UNIT),
            before + number(own, NEAR_WEIGHT),
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
            before + number(own, SINK_KEY),
            before + number(own, SINK_KEY_UNIT),
            before + number(own, SINK_VALUE),
            before + number(own, SINK_VALUE_UNIT),
            before + number(own, SINK_WEIGHT),
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
    t,
    here,
    scaling,
    best,
    mass,
    total,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Attend with a query to some tokens in int8, as one step of an online softmax. Returns the new ``best``, ``mass``
    and ``total``."""
    d, v = tl.arange(0, triton.next_power_of_2(DIM)), tl.arange(0, triton.next_power_of_2(VALUE_DIM))
    weight = tl.load(at(log_weight, 0, tl.float32) + t, mask=here, other=_NOTHING)
    here = here & (weight > _NOTHING)
    unit = tl.load(at(key_unit, 0, tl.int8) + t, mask=here, other=0).to(tl.int32)
    numbers = at(key, 0, tl.int8) + t[:, None] * DIM + d[None, :]
    keys = tl.load(numbers, mask=here[:, None] & (d < DIM)[None, :], other=0).to(tl.float32)
    scores = tl.sum(keys * asked[None, :], axis=1) * power_of_two(unit) * scaling + weight
    scores = tl.where(here, scores, float("-inf"))
    top = tl.maximum(best, tl.max(scores, axis=0))
    left, shares = tl.exp(best - top), tl.exp(scores - top)
    unit = tl.load(at(value_unit, 0, tl.int8) + t, mask=here, other=0).to(tl.int32)
    numbers = at(value, 0, tl.int8) + t[:, None] * VALUE_DIM + v[None, :]
    values = tl.load(numbers, mask=here[:, None] & (v < VALUE_DIM)[None, :], other=0).to(tl.float32)
    total = left * total + tl.sum((shares * power_of_two(unit))[:, None] * values, axis=0)
    return top, left * mass + tl.sum(shares, axis=0), total


@triton.jit
def write(
    key,  # of the new token
    value,
    log_weight,  # [B], or None
    descriptions,  # of the heads
    before,  # [B, row]
    codes,  # of the line
    scales,
    value_codes,
    value_scales,
    index,  # [units, places], places in the line of the tokens that stay
    stays,  # [units, places], their scores
    after,  # [B, after_row], or a pool of such rows, to be filled
    pages,  # row in the pool of each batch row [B], or None
    key_batch,
    key_head,
    value_batch,
    value_head,
    row,
    after_row,
    heads,
    places,
    KEY_SIZE: tl.constexpr,
    KEY_BLOCKS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCKS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """One program per head of a batch row and some tokens."""
    unit = tl.program_id(0).to(tl.int64)
    batch, own = unit // heads, described(descriptions, unit % heads)
    before += batch * row
    page = batch
    if pages is not None:
        page = tl.load(pages + batch).to(tl.int64)
    after += page * after_row
    t = tl.program_id(1) * TILE + tl.arange(0, TILE)

    to = t - (places - number(own, SLOTS))
    here = (to >= 0) & (t < places)
    source = unit * (places + 1) + tl.load(index + unit * places + t, mask=here, other=0)
    _moved(codes, source, after + number(own, CODES), to, here, KEY_SIZE)
    _moved(scales, source, after + number(own, SCALES), to, here, KEY_BLOCKS)
    _moved(value_codes, source, after + number(own, VALUE_CODES), to, here, VALUE_SIZE)
    _moved(value_scales, source, after + number(own, VALUE_SCALES), to, here, VALUE_BLOCKS)
    drawn = tl.load(stays + unit * places + t, mask=here, other=0)
    tl.store(at(after + number(own, SCORE), 0, tl.int16) + to, drawn, mask=here)

    near_key, near_key_unit = number(own, NEAR_KEY), number(own, NEAR_KEY_UNIT)
    near_value, near_value_unit = number(own, NEAR_VALUE), number(own, NEAR_VALUE_UNIT)
    near_weight, is_first = number(own, NEAR_WEIGHT), number(own, FIRST) == 1
    here = t < WINDOW - 1
    _moved(before + near_key, t + 1, after + near_key, t, here, DIM)
    _moved(before + near_key_unit, t + 1, after + near_key_unit, t, here, 1)
    _moved(before + near_value, t + 1, after + near_value, t, here, VALUE_DIM)
    _moved(before + near_value_unit, t + 1, after + near_value_unit, t, here, 1)
    _, held, becomes_sink = _leaving(before, own, SINKS)
    if is_first:
        weight = tl.load(at(before + near_weight, 0, tl.float32) + t + 1, mask=here, other=0.0)
        tl.store(at(after + near_weight, 0, tl.float32) + t, weight, mask=here)
    if tl.program_id(1) == 0:
        counts, weight = _weight_of(log_weight, batch)
        of_layer, last = number(own, OF_LAYER), WINDOW - 1
        key += batch * key_batch + of_layer * key_head
        _stored(key, counts, after + near_key, after + near_key_unit, last, DIM)
        value += batch * value_batch + of_layer * value_head
        _stored(value, counts, after + near_value, after + near_value_unit, last, VALUE_DIM)
        if is_first:
            tl.store(at(after + near_weight, 0, tl.float32) + WINDOW - 1, weight)

    if SINKS > 0:
        sink_key, sink_key_unit = number(own, SINK_KEY), number(own, SINK_KEY_UNIT)
        sink_value, sink_value_unit = number(own, SINK_VALUE), number(own, SINK_VALUE_UNIT)
        sink_weight = number(own, SINK_WEIGHT)
        here = t < SINKS
        comes = here & (t == held) & (t < held + becomes_sink)
        old, first = here & (comes == 0), tl.zeros_like(t)
        _moved(before + sink_key, t, after + sink_key, t, old, DIM)
        _moved(before + sink_key_unit, t, after + sink_key_unit, t, old, 1)
        _moved(before + sink_value, t, after + sink_value, t, old, VALUE_DIM)
        _moved(before + sink_value_unit, t, after + sink_value_unit, t, old, 1)
        _moved(before + near_key, first, after + sink_key, t, comes, DIM)
        _moved(before + near_key_unit, first, after + sink_key_unit, t, comes, 1)
        _moved(before + near_value, first, after + sink_value, t, comes, VALUE_DIM)
        _moved(before + near_value_unit, first, after + sink_value_unit, t, comes, 1)
        if is_first:
            weight = tl.load(at(before + sink_weight, 0, tl.float32) + t, mask=old, other=0.0)
            weight = tl.where(comes, tl.load(at(before + near_weight, 0, tl.float32)), weight)
            tl.store(at(after + sink_weight, 0, tl.float32) + t, weight, mask=here)


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
def _leaving(before, own, SINKS: tl.constexpr):
    """Three integers about the token that leaves the window: 1 if it is real and no padding, the number of sinks
    before it, and 1 if it becomes the next sink."""
    real = (tl.load(at(before + number(own, NEAR_WEIGHT), 0, tl.float32)) > _NOTHING).to(tl.int32)
    held = 0 * real
    if SINKS > 0:
        t = tl.arange(0, triton.next_power_of_2(SINKS))
        weights = at(before + number(own, SINK_WEIGHT), 0, tl.float32)
        weight = tl.load(weights + t, mask=t < SINKS, other=_NOTHING)
        held = tl.sum((weight > _NOTHING).to(tl.int32), axis=0)
    return real, held, real * (held < SINKS).to(tl.int32)
