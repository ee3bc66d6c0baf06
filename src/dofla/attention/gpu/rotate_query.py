"""Queries rotated to where the codes of keys stand (coding/coder.py), as a Triton kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dofla.attention.coding.coder import Coder
from dofla.attention.gpu.codes import Coding
from dofla.attention.gpu.numbers import at, packed, power_of_two, rounded, whole


def rotate_queries(coder: Coder, query: Tensor, groups: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Queries [B, H, L, d], float32 or bfloat16, of Hkv · groups heads, as
    :meth:`dofla.attention.coding.operations.CodeOperations.rotate_queries` turns them: rotated [B, H, L, d + 1],
    float32; and integers [B, H, L, blocks, block] with the unit of each block [B, H, L, blocks, 1], bit for bit those
    of plain torch."""
    query = query if query.stride(-1) == 1 else query.contiguous()
    batch, count, length, dim = query.shape
    blocks = dim // coder.block
    rotated, numbers, units = (
        query.new_empty(batch, count, length, *shape, dtype=torch.float32)
        for shape in ((dim + 1,), (blocks, coder.block), (blocks, 1))
    )
    with torch.cuda.device_of(query):  # Triton launches on the current device
        _rotate_queries[(batch * count * length, blocks)](
            *(query, coder.constants, rotated, numbers, units, *query.stride()[:3], count, groups, length),
            CODER=Coding.of(coder),
            enable_fp_fusion=False,
        )
    return rotated, (numbers, units)


@triton.jit
def _rotate_queries(
    query,  # [B, heads, L, dim]
    constants,  # of the coder
    rotated,  # [B, heads, L, dim + 1], to be filled, as all below
    numbers,  # [B, heads, L, blocks, block]
    units,  # [B, heads, L, blocks]
    query_batch,
    query_head,
    query_token,
    count,
    groups,
    length,
    CODER: tl.constexpr,
):
    """One program per query and block."""
    place, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head, token = place // (count * length), place // length % count, place % length
    query += batch * query_batch + head * query_head + token * query_token
    columns = columns_of_block(constants, head // groups, block, CODER)
    rotated += place * (CODER.dim + 1)
    numbers += place * CODER.dim
    units += place * CODER.blocks
    rotate_query(query, constants, head // groups, block, columns, rotated, numbers, units, CODER)


@triton.jit
def columns_of_block(constants, head, block, CODER: tl.constexpr):
    """The columns [padded, block] of a head's rotation that give a block of a query; and as integers of 16 bits, whose
    products with those of a query add up exactly (coder._whole_rows), with their exponents [block]."""
    DIM: tl.constexpr = CODER.dim
    PADDED: tl.constexpr = CODER.padded
    BLOCK: tl.constexpr = CODER.block
    d, n = tl.arange(0, PADDED), tl.arange(0, BLOCK)
    back = at(constants, CODER.back, tl.float32) + (head * DIM + d)[:, None] * DIM + (block * BLOCK + n)[None, :]
    back = tl.load(back, mask=(d < DIM)[:, None], other=0.0)
    one = tl.full([BLOCK], 1.0, tl.float64)
    most_of_sum = tl.sum(tl.abs(back).to(tl.float64), axis=0) / (16777215.0 * one / (127.0 * one))
    most = tl.maximum(most_of_sum, tl.max(tl.abs(back), axis=0).to(tl.float64) / (32767.0 * one))
    exponent = _power_above(tl.maximum(most, 2.0**-99))
    return back, rounded(back * power_of_two(-exponent)[None, :]), exponent


@triton.jit
def rotate_query(
    query,  # [dim]
    constants,  # of the coder
    head,
    block,
    columns,  # of columns_of_block
    rotated,  # [dim + 1], to be filled, as all below
    numbers,  # [blocks, block]
    units,  # [blocks]
    CODER: tl.constexpr,
):
    """Write a block of a rotated query, in float32 and as integers; with the first, what is added to its products."""
    DIM: tl.constexpr = CODER.dim
    PADDED: tl.constexpr = CODER.padded
    BLOCK: tl.constexpr = CODER.block
    d, n = tl.arange(0, PADDED), tl.arange(0, BLOCK)
    back, whole_columns, exponent = columns
    asked = tl.load(query + d, mask=d < DIM, other=0.0).to(tl.float32)
    tl.store(rotated + block * BLOCK + n, tl.sum(asked[:, None] * back, axis=0))
    if block == 0:
        mean = tl.load(at(constants, CODER.mean, tl.float32) + head * DIM + d, mask=d < DIM, other=0.0)
        tl.store(rotated + DIM, tl.sum(asked * mean, axis=0))
    integers, query_exponent = packed(asked)
    found = tl.sum(integers[:, None] * whole_columns, axis=0)
    found *= power_of_two(exponent) * power_of_two(query_exponent)
    own_numbers, unit = whole(found[None, :])
    tl.store(numbers + block * BLOCK + n[None, :], own_numbers)
    tl.store(units + block + tl.arange(0, 1), unit)


@triton.jit
def _power_above(x):
    """The exponent of the least power of two that is not below x, float64 and above 0: int32."""
    bits = x.to(tl.int64, bitcast=True)
    fraction = bits & ((1 << 52) - 1)
    return ((bits >> 52) - 1022 - (fraction == 0).to(tl.int64)).to(tl.int32)
