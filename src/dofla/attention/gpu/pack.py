"""Vectors in int8 (attention/eight_bits.py, ``pack``) as a Triton kernel, bit for bit. Importing this file needs
triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dofla.attention.gpu.numbers import exponent_of, power_of_two, rounded

VECTORS = 32
"""Vectors of a program."""


def pack(x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors [B, H, L, d], float32 or bfloat16, as integers [B, H, L, d] and exponents [B, H, L], both int8."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, length, dim = x.shape
    integers = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    exponents = torch.empty(x.shape[:-1], dtype=torch.int8, device=x.device)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _pack[(batch * heads, triton.cdiv(length, VECTORS))](
            *(x, integers, exponents, *x.stride()[:3], heads, length, dim),
            DIM=triton.next_power_of_2(dim),
            VECTORS=VECTORS,
            enable_fp_fusion=False,
        )
    return integers, exponents


@triton.jit
def _pack(
    x,
    integers,
    exponents,
    of_batch,
    of_head,
    of_token,
    heads,
    length,
    dim,
    DIM: tl.constexpr,
    VECTORS: tl.constexpr,
):
    unit, n = tl.program_id(0).to(tl.int64), tl.arange(0, DIM)
    token = tl.program_id(1) * VECTORS + tl.arange(0, VECTORS)
    mask = (token < length)[:, None] & (n < dim)[None, :]
    place = (unit // heads) * of_batch + (unit % heads) * of_head + token[:, None] * of_token + n[None, :]
    own = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    exponent = exponent_of(tl.max(tl.abs(own), axis=1)) - 7
    exponent = tl.minimum(tl.maximum(exponent, -120), 120)
    found = tl.minimum(tl.maximum(rounded(own * power_of_two(-exponent)[:, None]), -127.0), 127.0)
    row = unit * length + token
    tl.store(integers + row[:, None] * dim + n[None, :], found.to(tl.int8), mask=mask)
    tl.store(exponents + row, exponent.to(tl.int8), mask=token < length)
