"""The Triton kernels; the host code and the algorithm are in __init__.py.

A unit is one KV head of one batch row. Tensors are contiguous. Masked places hold numbers that keep everything finite:
a missing token is a key of log-feature -inf, a missing feature one that no query has.
"""

import triton
import triton.language as tl

from dofla.attention.constants import SMALLEST_TRUSTED_MASS

_SMALLEST_TRUSTED_MASS = tl.constexpr(SMALLEST_TRUSTED_MASS)


@triton.jit
def states_before_chunks(
    b,  # [B, Hkv, L, M]
    value,  # [B, Hkv, L, dv]
    mean,  # [units, M, dv], the state before the first token
    log_mass,  # [units, M]
    means,  # [units, chunks, M, dv], to be filled, as all below
    log_masses,  # [units, chunks, M]
    tops,  # [units, chunks, M], the largest log-feature of the chunk or of the past
    untrusted,  # [units, chunks], cleared
    mean_after,  # [units, M, dv]
    log_mass_after,  # [units, M]
    length,
    features,
    value_dim,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per unit, block of features and block of values."""
    unit = tl.program_id(0).to(tl.int64)  # int64: a long batch has more than 2^31 numbers
    chunks = tl.cdiv(length, CHUNK)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    j = tl.arange(0, CHUNK)
    is_feature, is_value = m < features, n < value_dim
    in_state = is_feature[:, None] & is_value[None, :]
    place = m[:, None] * value_dim + n[None, :]

    b += unit * length * features
    value += unit * length * value_dim
    means += unit * chunks * features * value_dim
    log_masses += unit * chunks * features
    tops += unit * chunks * features
    untrusted += unit * chunks

    average = tl.load(mean + unit * features * value_dim + place, mask=in_state, other=0.0)
    level = tl.load(log_mass + unit * features + m, mask=is_feature, other=0.0)
    for chunk in range(0, chunks):
        is_token = chunk * CHUNK + j < length
        rows = tl.load(
            b + j[:, None] * features + m[None, :], mask=is_token[:, None] & is_feature[None, :], other=float("-inf")
        ).to(tl.float32)
        values = tl.load(
            value + j[:, None] * value_dim + n[None, :], mask=is_token[:, None] & is_value[None, :], other=0.0
        )
        top = tl.maximum(level.to(tl.float32), tl.max(rows, axis=0))
        tl.store(means + place, average, mask=in_state)
        tl.store(log_masses + m, level, mask=is_feature)
        tl.store(tops + m, top, mask=is_feature)
        tl.store(untrusted + chunk, 0)

        keys = tl.exp(rows - top[None, :])
        # In float64: a mass in which small keys shall not be lost after many steps.
        past = tl.exp(level - top.to(tl.float64))
        mass = past + tl.sum(keys, axis=0).to(tl.float64)
        left, share = (past / mass).to(tl.float32), (1.0 / mass).to(tl.float32)
        arrived = tl.dot(tl.trans(keys).to(values.dtype), values, input_precision=PRECISION)
        average = left[:, None] * average + share[:, None] * arrived
        level = top.to(tl.float64) + tl.log(mass)

        # Steps as long as a chunk stay below 2^31, their sum need not.
        b += CHUNK * features
        value += CHUNK * value_dim
        means += features * value_dim
        log_masses += features
        tops += features
    tl.store(mean_after + unit * features * value_dim + place, average, mask=in_state)
    tl.store(log_mass_after + unit * features + m, level, mask=is_feature)


@triton.jit
def read_chunks(
    a,  # [B, H, L, M]
    b,  # [B, Hkv, L, M]
    value,  # [B, Hkv, L, dv]
    means,  # [units, chunks, M, dv], as all up to ``tops`` left by states_before_chunks
    log_masses,  # [units, chunks, M]
    tops,  # [units, chunks, M]
    untrusted,  # [units, chunks], set where the results of the chunk are not to be trusted
    out,  # [B, H, L, dv], to be filled
    normalizer,  # [B, H, L], to be filled
    groups,
    length,
    features,
    value_dim,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per batch row, query head, chunk and block of values."""
    chunks = tl.cdiv(length, CHUNK)
    row = tl.program_id(0).to(tl.int64) // chunks
    chunk = tl.program_id(0).to(tl.int64) % chunks
    unit, start = row // groups, chunk * CHUNK
    unit_chunk = unit * chunks + chunk
    i = tl.arange(0, CHUNK)
    n = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_token, is_value = start + i < length, n < value_dim

    a += (row * length + start) * features
    b += (unit * length + start) * features
    value += (unit * length + start) * value_dim
    means += unit_chunk * features * value_dim
    log_masses += unit_chunk * features
    tops += unit_chunk * features

    # Queries are measured from their own best feature at the level of the keys.
    best = tl.full([CHUNK], float("-inf"), tl.float32)
    for first in range(0, features, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        top = tl.load(tops + m, mask=m < features, other=0.0)
        here = is_token[:, None] & (m < features)[None, :]
        queries = tl.load(a + i[:, None] * features + m[None, :], mask=here, other=0.0).to(tl.float32) + top[None, :]
        best = tl.maximum(best, tl.max(tl.where((m < features)[None, :], queries, float("-inf")), axis=1))

    values = tl.load(value + i[:, None] * value_dim + n[None, :], mask=is_token[:, None] & is_value[None, :], other=0.0)
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    total = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    mass = tl.zeros([CHUNK], tl.float32)
    for first in range(0, features, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        is_feature = m < features
        here = is_token[:, None] & is_feature[None, :]
        top = tl.load(tops + m, mask=is_feature, other=0.0)
        level = tl.load(log_masses + m, mask=is_feature, other=0.0)
        queries = tl.load(a + i[:, None] * features + m[None, :], mask=here, other=0.0).to(tl.float32) + top[None, :]
        queries = tl.exp(tl.where(is_feature[None, :], queries - best[:, None], float("-inf")))
        keys = tl.load(b + i[:, None] * features + m[None, :], mask=here, other=float("-inf")).to(tl.float32)
        keys = tl.exp(keys - top[None, :])
        pairs = tl.dot(queries.to(values.dtype), tl.trans(keys).to(values.dtype), acc=pairs, input_precision=PRECISION)
        to_past = queries * tl.exp((level - top.to(tl.float64)).to(tl.float32))[None, :]
        mass += tl.sum(to_past, axis=1)
        average = tl.load(
            means + m[:, None] * value_dim + n[None, :], mask=is_feature[:, None] & is_value[None, :], other=0.0
        )
        total = tl.dot(to_past.to(values.dtype), average.to(values.dtype), acc=total, input_precision=PRECISION)

    pairs = tl.where(i[:, None] >= i[None, :], pairs, 0.0)
    mass += tl.sum(pairs, axis=1)
    total = tl.dot(pairs.to(values.dtype), values, acc=total, input_precision=PRECISION)
    if tl.min(tl.where(is_token, mass, 1.0), axis=0) < _SMALLEST_TRUSTED_MASS:
        tl.store(untrusted + unit_chunk, 1)

    token = row * length + start
    tl.store(
        out + token * value_dim + i[:, None] * value_dim + n[None, :],
        total / mass[:, None],
        mask=is_token[:, None] & is_value[None, :],
    )
    tl.store(normalizer + token + i, best + tl.log(mass), mask=is_token)


@triton.jit
def token_by_token(
    a,  # [B, H, L, M]
    b,  # [B, Hkv, L, M]
    value,  # [B, Hkv, L, dv]
    means,  # [units, chunks, M, dv], the states before each chunk
    log_masses,  # [units, chunks, M]
    only,  # [units, chunks], the chunks to do; None for all
    out,  # [B, H, L, dv], to be filled
    normalizer,  # [B, H, L], to be filled
    mean_after,  # [units, chunks, M, dv], to be filled with the states after each chunk; None if nobody asks
    log_mass_after,  # [units, chunks, M]
    groups,
    length,
    features,
    value_dim,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,  # all features
    BLOCK_V: tl.constexpr,
):
    """One program per unit, chunk and block of values: absorb a key, read for the query heads of the group, go on."""
    unit_chunk = tl.program_id(0).to(tl.int64)
    if only is not None:  # noqa: SIM102, this one is decided when compiling
        if tl.load(only + unit_chunk) == 0:
            return
    chunks = tl.cdiv(length, CHUNK)
    unit, start = unit_chunk // chunks, unit_chunk % chunks * CHUNK
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_feature, is_value = m < features, n < value_dim
    in_state = is_feature[:, None] & is_value[None, :]
    place = unit_chunk * features * value_dim + m[:, None] * value_dim + n[None, :]

    row = unit * groups * length + start  # of the first query head
    a += row * features
    b += (unit * length + start) * features
    value += (unit * length + start) * value_dim
    out += row * value_dim
    normalizer += row

    average = tl.load(means + place, mask=in_state, other=0.0)
    level = tl.load(log_masses + unit_chunk * features + m, mask=is_feature, other=0.0)
    for _token in range(0, tl.minimum(length - start, CHUNK)):
        key = tl.load(b + m, mask=is_feature, other=0.0).to(tl.float64)
        values = tl.load(value + n, mask=is_value, other=0.0).to(tl.float32)
        top = tl.maximum(level, key)
        past, new = tl.exp(level - top), tl.exp(key - top)
        mass = past + new
        left, share = (past / mass).to(tl.float32), (new / mass).to(tl.float32)
        average = left[:, None] * average + share[:, None] * values[None, :]
        level = top + tl.log(mass)
        query_row, out_row, normalizer_row = a, out, normalizer
        for _head in range(0, groups):
            query = tl.load(query_row + m, mask=is_feature, other=0.0).to(tl.float64) + level
            query = tl.where(is_feature, query, float("-inf"))
            best = tl.max(query, axis=0)
            weights = tl.exp((query - best).to(tl.float32))
            total = tl.sum(weights, axis=0)
            seen = tl.sum(weights[:, None] * average, axis=0) / total
            tl.store(out_row + n, seen, mask=is_value)
            tl.store(normalizer_row, (best + tl.log(total).to(tl.float64)).to(tl.float32))
            query_row += length * features
            out_row += length * value_dim
            normalizer_row += length
        a += features
        b += features
        value += value_dim
        out += value_dim
        normalizer += 1
    if mean_after is not None:
        tl.store(mean_after + place, average, mask=in_state)
        tl.store(log_mass_after + unit_chunk * features + m, level, mask=is_feature)
