"""The rows of bytes that a compressed cache is kept in (layout.py), as the kernels of a decoded token read and update
them. Where the parts of a head begin in a row, its description says."""

import triton
import triton.language as tl

from dofla.attention.constants import FREE, LOG_ZERO
from dofla.attention.gpu.numbers import at, packed, power_of_two
from dofla.attention.layout import HEAD_NUMBERS

WINDOW, SINKS, TIER = (tl.constexpr(HEAD_NUMBERS.index(name)) for name in ("window_key", "sink_key", "tier_key"))
"""The first of five parts: keys and what scales them, values and what scales those, and log-weights or scores."""
SLOTS, GROWS, HEAD, FIRST = (tl.constexpr(HEAD_NUMBERS.index(name)) for name in ("slots", "grows", "head", "first"))
_COUNT = tl.constexpr(len(HEAD_NUMBERS))
NOTHING = tl.constexpr(LOG_ZERO)
_FREE = tl.constexpr(FREE)


@triton.jit
def described(heads, head):
    """The numbers of a head (:data:`dofla.attention.layout.HEAD_NUMBERS`)."""
    return heads + head * _COUNT


@triton.jit
def number(own, NAME: tl.constexpr):
    """One of the numbers of a head."""
    return tl.load(own + NAME).to(tl.int64)


@triton.jit
def vectors_of(state, own, TOKENS: tl.constexpr):
    """Where keys of some tokens, what scales them, values and what scales those begin."""
    return (
        state + number(own, TOKENS),
        state + number(own, TOKENS + 1),
        state + number(own, TOKENS + 2),
        state + number(own, TOKENS + 3),
    )


@triton.jit
def log_weights_of(state, own, TOKENS: tl.constexpr):
    """Where the log-weights of the window or of sinks begin."""
    return at(state + number(own, TOKENS + 4), 0, tl.float32)


@triton.jit
def tier_scores(state, own):
    """Where the scores of the tier begin."""
    return at(state + number(own, TIER + 4), 0, tl.int16)


@triton.jit
def row_of(states, pages, batch, row):
    """Where the row of a sequence begins."""
    page = batch
    if pages is not None:
        page = tl.load(pages + batch).to(tl.int64)
    return states + page * row


@triton.jit
def weight_of(log_weight, batch):
    """1.0 if the new token counts, or 0.0, and the logarithm of its weight."""
    weight = 0.0
    if log_weight is not None:
        weight = tl.load(log_weight + batch)
    return tl.where(weight > NOTHING, 1.0, 0.0), weight


@triton.jit
def leaving_window(weights, SHAPE: tl.constexpr):
    """Three integers about the token that leaves the window, by the ``weights`` of window and sinks: 1 if it is real
    and no padding, the number of sinks before it, and 1 if it becomes the next sink."""
    COUNT: tl.constexpr = SHAPE.sinks
    real = (tl.load(weights) > NOTHING).to(tl.int32)
    held = 0 * real
    if COUNT > 0:
        t = tl.arange(0, triton.next_power_of_2(COUNT))
        weight = tl.load(weights + SHAPE.window + t, mask=t < COUNT, other=NOTHING)
        held = tl.sum((weight > NOTHING).to(tl.int32), axis=0)
    return real, held, real * (held < COUNT).to(tl.int32)


@triton.jit
def score_on_entry(weights, SHAPE: tl.constexpr):
    """Score of the token that enters the tier."""
    real, _, becomes_sink = leaving_window(weights, SHAPE)
    return tl.where(real > becomes_sink, 0, _FREE)


@triton.jit
def scores_of(state, own, t, here):
    """Scores of the tokens at ``t`` of a tier; 0 where there is none."""
    return tl.load(tier_scores(state, own) + t, mask=here, other=0).to(tl.int32)


@triton.jit
def as_kept(x, counts, CODER: tl.constexpr):
    """A vector in int8, integers [padded] and their exponent; zeros where it does not count."""
    PADDED: tl.constexpr = CODER.padded
    n = tl.arange(0, PADDED)
    return packed(tl.load(x + n, mask=n < CODER.dim, other=0.0).to(tl.float32) * counts)


@triton.jit
def in_int8(numbers, exponents, t, here, CODER: tl.constexpr):
    """Tokens in int8: their integers [T, padded], float32, and what one is worth [T]."""
    PADDED: tl.constexpr = CODER.padded
    n = tl.arange(0, PADDED)
    numbers = at(numbers, 0, tl.int8) + t[:, None] * CODER.dim + n[None, :]
    found = tl.load(numbers, mask=here[:, None] & (n < CODER.dim)[None, :], other=0).to(tl.float32)
    return found, power_of_two(tl.load(at(exponents, 0, tl.int8) + t, mask=here, other=0).to(tl.int32))


@triton.jit
def update_tier(
    state,
    own,
    slots,
    enters,  # where a token enters
    evicted,  # where one leaves
    entering,  # bytes of the one that enters: codes and scales of its key, then of its value
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """The tokens before the one that leaves move towards it, the last ones first, and one enters."""
    MOVED: tl.constexpr = SHAPE.moved_up
    codes, scales, value_codes, value_scales = vectors_of(state, own, TIER)
    scale = entering + KEY.size
    value = scale + KEY.blocks
    value_scale = value + VALUE.size
    for back in range(0, evicted - enters + 1, MOVED):
        t = evicted - back - tl.arange(0, MOVED)
        here, new = (t >= enters) & (t < slots), t == enters
        key_bytes = _taken(tl.where(new, entering, codes + (t - 1) * KEY.size), here, KEY.size)
        scale_bytes = _taken(tl.where(new, scale, scales + (t - 1) * KEY.blocks), here, KEY.blocks)
        value_bytes = _taken(tl.where(new, value, value_codes + (t - 1) * VALUE.size), here, VALUE.size)
        value_scale_bytes = _taken(
            tl.where(new, value_scale, value_scales + (t - 1) * VALUE.blocks), here, VALUE.blocks
        )
        tl.debug_barrier()  # all have loaded what others overwrite
        _put(codes + t * KEY.size, key_bytes, here, KEY.size)
        _put(scales + t * KEY.blocks, scale_bytes, here, KEY.blocks)
        _put(value_codes + t * VALUE.size, value_bytes, here, VALUE.size)
        _put(value_scales + t * VALUE.blocks, value_scale_bytes, here, VALUE.blocks)


@triton.jit
def update_window(
    state,
    own,
    key,  # of the new token
    value,
    weight,
    weights,  # of window and sinks, as they were
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """The first token of the window becomes a sink or has evicted, the others move up, and the new one is the last."""
    MOVED: tl.constexpr = SHAPE.moved
    LAST: tl.constexpr = SHAPE.window - 1
    near_key, near_key_unit, near_value, near_value_unit = vectors_of(state, own, WINDOW)
    near_weight, is_first = log_weights_of(state, own, WINDOW), number(own, FIRST) == 1
    if SHAPE.sinks > 0:
        sink_key, sink_key_unit, sink_value, sink_value_unit = vectors_of(state, own, SINKS)
        _, held, becomes_sink = leaving_window(weights, SHAPE)
        first = tl.arange(0, 1)
        goes, to = first < becomes_sink, first + held
        _put(sink_key + to * KEY.dim, _taken(near_key + first, goes, KEY.dim), goes, KEY.dim)
        _put(sink_key_unit + to, _taken(near_key_unit + first, goes, 1), goes, 1)
        _put(sink_value + to * VALUE.dim, _taken(near_value + first, goes, VALUE.dim), goes, VALUE.dim)
        _put(sink_value_unit + to, _taken(near_value_unit + first, goes, 1), goes, 1)
        if is_first:
            tl.store(log_weights_of(state, own, SINKS) + to, tl.load(weights + first), mask=goes)
    for begin in range(0, LAST, MOVED):
        t = begin + tl.arange(0, MOVED)
        here = t < LAST
        key_bytes = _taken(near_key + (t + 1) * KEY.dim, here, KEY.dim)
        key_unit = _taken(near_key_unit + t + 1, here, 1)
        value_bytes = _taken(near_value + (t + 1) * VALUE.dim, here, VALUE.dim)
        value_unit = _taken(near_value_unit + t + 1, here, 1)
        tl.debug_barrier()  # all have loaded what others overwrite
        _put(near_key + t * KEY.dim, key_bytes, here, KEY.dim)
        _put(near_key_unit + t, key_unit, here, 1)
        _put(near_value + t * VALUE.dim, value_bytes, here, VALUE.dim)
        _put(near_value_unit + t, value_unit, here, 1)
        if is_first:
            tl.store(near_weight + t, tl.load(weights + t + 1, mask=here, other=0.0), mask=here)
    tl.debug_barrier()
    counts = tl.where(weight > NOTHING, 1.0, 0.0)
    _store_kept(key, counts, near_key + LAST * KEY.dim, near_key_unit + LAST, KEY)
    _store_kept(value, counts, near_value + LAST * VALUE.dim, near_value_unit + LAST, VALUE)
    if is_first:
        tl.store(near_weight + LAST, weight)


@triton.jit
def _taken(places, here, SIZE: tl.constexpr):
    """The bytes [T, SIZE] at ``places`` [T]."""
    n = tl.arange(0, triton.next_power_of_2(SIZE))
    return tl.load(places[:, None] + n[None, :], mask=here[:, None] & (n < SIZE)[None, :], other=0)


@triton.jit
def _put(places, bytes, here, SIZE: tl.constexpr):
    n = tl.arange(0, triton.next_power_of_2(SIZE))
    tl.store(places[:, None] + n[None, :], bytes, mask=here[:, None] & (n < SIZE)[None, :])


@triton.jit
def _store_kept(x, counts, integers, exponent, CODER: tl.constexpr):
    """A vector of the new token, as it is kept."""
    PADDED: tl.constexpr = CODER.padded
    n = tl.arange(0, PADDED)
    numbers, own = as_kept(x, counts, CODER)
    tl.store(at(integers, 0, tl.int8) + n, numbers.to(tl.int8), mask=n < CODER.dim)
    tl.store(at(exponent, 0, tl.int8), own.to(tl.int8))
