"""Vectors of codes as they were before rotation (coding/coder.py), as a Triton kernel. Importing this file needs
triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dofla.attention.coding.coder import Coder
from dofla.attention.gpu.codes import CodedVectors, tables_on
from dofla.attention.gpu.decode import starts_of, values_of
from dofla.attention.gpu.numbers import at
from dofla.attention.gpu.tier import PRECISION

_PRECISION = tl.constexpr(PRECISION)
TOKENS = 32
"""Vectors of a program."""


def unrotated(coder: Coder, vectors: CodedVectors) -> Tensor:
    """Vectors [B, Hkv, n, d], float32, of codes."""
    batch, heads, tokens = vectors.codes.shape[:3]
    out = torch.empty(batch, heads, tokens, coder.dim, dtype=torch.float32, device=vectors.codes.device)
    with torch.cuda.device_of(out):  # Triton launches on the current device
        _unrotated[(batch * heads, triton.cdiv(tokens, TOKENS))](
            *(*vectors.tensors(), tables_on(out.device), out, heads, tokens),
            CODER=vectors.coding,
            CHUNK=min(32, vectors.coding.padded),
            TOKENS=TOKENS,
        )
    return out


@triton.jit
def _unrotated(
    codes,  # [units, n, bytes]
    scales,  # [units, n, blocks]
    constants,  # of the coder
    tables,
    out,  # [units, n, dim], to be filled
    heads,
    tokens,
    CODER: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program per KV head of a batch row and some of its vectors."""
    DIM: tl.constexpr = CODER.dim
    PADDED: tl.constexpr = CODER.padded
    unit = tl.program_id(0).to(tl.int64)
    token, v = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, PADDED)
    is_token, is_number = token < tokens, v < DIM
    place, row = unit * tokens + token, unit % heads * DIM + v
    codes, scales = codes + place * CODER.size, scales + place * CODER.blocks
    widths = at(constants, CODER.bits, tl.uint8)
    mean = tl.load(at(constants, CODER.mean, tl.float32) + row, mask=is_number, other=0.0)
    found = tl.zeros([TOKENS, PADDED], tl.float32) + mean[None, :]
    for begin in range(0, DIM, CHUNK):  # rotated @ back.mT
        n = begin + tl.arange(0, CHUNK)
        before, bits = starts_of(n, widths, CODER)
        rotated = values_of(codes, scales, n, before, bits, tables, is_token, CODER)
        back = at(constants, CODER.back, tl.float32) + row[None, :] * DIM + n[:, None]
        back = tl.load(back, mask=(n < DIM)[:, None] & is_number[None, :], other=0.0)
        found += tl.dot(rotated, back, input_precision=_PRECISION)
    tl.store(out + place[:, None] * DIM + v[None, :], found, mask=is_token[:, None] & is_number[None, :])
