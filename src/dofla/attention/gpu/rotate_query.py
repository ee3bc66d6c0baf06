"""Queries rotated to where the codes of keys stand (coding/coder.py), as a Triton kernel. Importing this file needs
triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dofla.attention.coding.coder import Coder
from dofla.attention.gpu.numbers import at, packed, power_of_two, rounded, whole
from dofla.attention.gpu.side_by_side import JointCoder


def rotate_queries(
    coder: Coder | JointCoder, query: Tensor, groups: int, heads: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Queries as :meth:`dofla.attention.Coder.rotate_query` turns them, and as
    :meth:`dofla.attention.Coder.rotate_query_integer` does.

    Args:
        coder: of the keys, of Hkv heads.
        query: [B, H, L, d], float32 or bfloat16.
        groups: query heads of a KV head.
        heads: [Hkv], int32, those of the layer that the coder is for, at any stride; default all.

    Returns:
        Rotated queries [B, Hkv · groups, L, d + 1], float32, with what is to be added to their products in the last
        number. And integers [B, Hkv · groups, L, blocks, block] with the unit of each block
        [B, Hkv · groups, L, blocks, 1], bit for bit those of plain torch.
    """
    query = query if query.stride(-1) == 1 else query.contiguous()
    batch, _, length, dim = query.shape
    count, blocks = coder.heads * groups, dim // coder.block
    rotated, numbers, units = (
        query.new_empty(batch, count, length, *shape, dtype=torch.float32)
        for shape in ((dim + 1,), (blocks, coder.block), (blocks, 1))
    )
    with torch.cuda.device_of(query):  # Triton launches on the current device
        _rotate_queries[(batch * count * length, blocks)](
            *(query, coder.constants, heads, rotated, numbers, units),
            *(*query.stride()[:3], 0 if heads is None else heads.stride(0), count, groups, length, dim, blocks),
            BACK=coder.starts[2],
            MEAN=coder.starts[3],
            DIM=triton.next_power_of_2(dim),
            BLOCK=coder.block,
            enable_fp_fusion=False,
        )
    return rotated, (numbers, units)


@triton.jit
def _rotate_queries(
    query,  # [B, heads of the layer, L, dim]
    constants,  # of the coder
    heads,  # of the layer, or None
    rotated,  # [B, count, L, dim + 1], to be filled, as all below
    numbers,  # [B, count, L, blocks, BLOCK]
    units,  # [B, count, L, blocks]
    query_batch,
    query_head,
    query_token,
    heads_stride,
    count,
    groups,
    length,
    dim,
    blocks,
    BACK: tl.constexpr,  # where the parts of the constants begin
    MEAN: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per query and block."""
    place, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, own, token = place // (count * length), place // length % count, place % length
    head = own // groups
    of_layer = head
    if heads is not None:
        of_layer = tl.load(heads + head * heads_stride).to(tl.int64)
    d, n = tl.arange(0, DIM), tl.arange(0, BLOCK)
    is_number = d < dim
    query += batch * query_batch + (of_layer * groups + own % groups) * query_head + token * query_token
    asked = tl.load(query + d, mask=is_number, other=0.0).to(tl.float32)
    columns = at(constants, BACK, tl.float32) + (head * dim + d)[:, None] * dim + (block * BLOCK + n)[None, :]
    back = tl.load(columns, mask=is_number[:, None], other=0.0)
    tl.store(rotated + place * (dim + 1) + block * BLOCK + n, tl.sum(asked[:, None] * back, axis=0))
    if block == 0:
        mean = tl.load(at(constants, MEAN, tl.float32) + head * dim + d, mask=is_number, other=0.0)
        tl.store(rotated + place * (dim + 1) + dim, tl.sum(asked * mean, axis=0))

    # Columns of integers of 16 bits, whose products with those of the query add up exactly (coder._whole_rows).
    one = tl.full([BLOCK], 1.0, tl.float64)
    most_of_sum = tl.sum(tl.abs(back).to(tl.float64), axis=0) / (16777215.0 * one / (127.0 * one))
    most = tl.maximum(most_of_sum, tl.max(tl.abs(back), axis=0).to(tl.float64) / (32767.0 * one))
    exponent = _power_above(tl.maximum(most, 2.0**-99))
    columns = rounded(back * power_of_two(-exponent)[None, :])
    integers, query_exponent = packed(asked)
    found = tl.sum(integers[:, None] * columns, axis=0)
    found *= power_of_two(exponent) * power_of_two(query_exponent)
    own_numbers, unit = whole(found[None, :])
    tl.store(numbers + (place * blocks + block) * BLOCK + n[None, :], own_numbers)
    tl.store(units + place * blocks + block + tl.arange(0, 1), unit)


@triton.jit
def _power_above(x):
    """The exponent of the least power of two that is not below x, float64 and above 0: int32."""
    bits = x.to(tl.int64, bitcast=True)
    fraction = bits & ((1 << 52) - 1)
    return ((bits >> 52) - 1022 - (fraction == 0).to(tl.int64)).to(tl.int32)
