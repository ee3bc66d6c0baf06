"""Vectors of codes as they were before rotation (coding/coder.py), as a Triton kernel. Importing this file needs
triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dofla.attention.coding.coder import Coder
from dofla.attention.gpu.codes import Codes
from dofla.attention.gpu.decode import levels_of, units_of
from dofla.attention.gpu.numbers import at
from dofla.attention.gpu.tiers import PRECISION

TOKENS = 32
"""Vectors of a program."""


def unrotated(coder: Coder, vectors: Codes) -> Tensor:
    """Vectors [B, Hkv, n, d], float32, of codes."""
    codes, scales, bits, _, size = vectors.arguments()
    batch, heads, tokens = codes.shape[:3]
    out = torch.empty(batch, heads, tokens, coder.dim, dtype=torch.float32, device=codes.device)
    _, _, back, mean, *_ = coder.starts
    with torch.cuda.device_of(codes):  # Triton launches on the current device
        _unrotated[(batch * heads, triton.cdiv(tokens, TOKENS))](
            *(codes, scales, bits, size, vectors.levels, vectors.units, coder.constants, out),
            *(heads, tokens, coder.dim, vectors.blocks),
            BACK=back,
            MEAN=mean,
            BLOCK=coder.block,
            BLOCKS=triton.next_power_of_2(vectors.blocks),
            DIM=max(16, triton.next_power_of_2(coder.dim)),
            CHUNK=min(32, max(16, triton.next_power_of_2(coder.dim))),
            TOKENS=TOKENS,
            PRECISION=PRECISION,
        )
    return out


@triton.jit
def _unrotated(
    codes,  # [units, n, size]
    scales,  # [units, n, blocks]
    bits,  # [blocks]
    size,
    levels,
    scale_units,
    constants,  # of the coder
    out,  # [units, n, dim], to be filled
    heads,
    tokens,
    dim,
    blocks,
    BACK: tl.constexpr,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per KV head of a batch row and some of its vectors."""
    unit = tl.program_id(0).to(tl.int64)
    token, v, every = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, DIM), tl.arange(0, BLOCKS)
    is_token, is_number = token < tokens, v < dim
    place, row = unit * tokens + token, unit % heads * dim + v
    widths = tl.load(bits + every, mask=every < blocks, other=0).to(tl.int32) * (BLOCK // 8)
    mean = tl.load(at(constants, MEAN, tl.float32) + row, mask=is_number, other=0.0)
    found = tl.zeros([TOKENS, DIM], tl.float32) + mean[None, :]
    for begin in range(0, dim, CHUNK):  # rotated @ back.mT
        n = begin + tl.arange(0, CHUNK)
        is_own = n < dim
        before = tl.sum(tl.where(every[None, :] < (n // BLOCK)[:, None], widths[None, :], 0), axis=1)
        own = tl.load(bits + n // BLOCK, mask=is_own, other=1).to(tl.int32)
        here = is_token[:, None] & is_own[None, :]
        rotated = levels_of(codes + place[:, None] * size + before[None, :], n % BLOCK, own, levels, here, BLOCK)
        rotated *= units_of(scales + place[:, None] * blocks + (n // BLOCK)[None, :], scale_units, here)
        back = at(constants, BACK, tl.float32) + row[None, :] * dim + n[:, None]
        back = tl.load(back, mask=is_own[:, None] & is_number[None, :], other=0.0)
        found += tl.dot(rotated, back, input_precision=PRECISION)
    tl.store(out + place[:, None] * dim + v[None, :], found, mask=is_token[:, None] & is_number[None, :])
