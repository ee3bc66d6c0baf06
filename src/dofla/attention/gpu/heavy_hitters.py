"""Which tokens stay because they draw attention (coding/heavy_hitters.py), as Triton kernels.

All arithmetic is that of plain torch, bit for bit: products of integers, up to 256 and so exact in float16, that
sum to less than 2²⁴, and single operations, each rounded by itself; so none may be fused with another.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from dofla.attention.coding import CodedTokens, Coder
from dofla.attention.coding.coder import Numbers
from dofla.attention.coding.heavy_hitters import weight_steps
from dofla.attention.constants import DECAY, GAIN, LEAST_STEPS, MOST_SCORE, MOST_STEPS, NEVER
from dofla.attention.gpu import block_count, block_size
from dofla.attention.gpu.codes import Coding, coded, tables_on
from dofla.attention.gpu.decode import LEAST, keys_of, units_of
from dofla.attention.gpu.numbers import at, rounded

_GAIN = tl.constexpr(GAIN)
_DECAY = tl.constexpr(DECAY)
_MOST_SCORE = tl.constexpr(MOST_SCORE)
_NEVER = tl.constexpr(NEVER)
_MOST_STEPS = tl.constexpr(MOST_STEPS)
_LEAST_STEPS = tl.constexpr(float(LEAST_STEPS))

_LAST = tl.constexpr(2**62)
"""Behind all ranks."""


def select_survivors(
    coder: Coder, query_integers: Numbers, real: Tensor, line: CodedTokens, newest: int, scaling: float
) -> tuple[CodedTokens, Tensor]:
    """:func:`dofla.attention.coding.heavy_hitters.select_survivors`; which query sees a token no more is int32."""
    per_step, weights = weight_steps(scaling, real.device)
    steps = logarithms(coder, query_integers, line, per_step)
    batch, kv_heads, groups, length, tokens = steps.shape
    index = line.score.new_empty(batch, kv_heads, tokens - length, dtype=torch.int64)
    after, evicted_at = torch.empty_like(index, dtype=torch.int16), torch.empty_like(line.score, dtype=torch.int32)
    lanes = triton.next_power_of_2(tokens)
    tile = triton.next_power_of_2(groups) * lanes
    with torch.cuda.device_of(steps):  # Triton launches on the current device
        _select_survivors[(batch * kv_heads,)](
            *(steps, real.contiguous(), line.score.contiguous(), weights, index, after, evicted_at),
            *(kv_heads, groups, length, tokens, newest),
            GROUPS=triton.next_power_of_2(groups),
            TOKENS=lanes,
            enable_fp_fusion=False,
            num_warps=min(16, max(1, tile // 512)),
        )
    return replace(line.take(index), score=after), evicted_at


def logarithms(coder: Coder, query_integers: Numbers, line: CodedTokens, per_step: float) -> Tensor:
    """Logarithms of the attention weights of all pairs of a query and a token of a line, in integer steps
    [B, Hkv, G, L, S], float32; ``per_step`` are steps per unit of a product of query and key."""
    numbers, unit = (x.contiguous() for x in query_integers)
    batch, heads, length = numbers.shape[:3]
    kv_heads, tokens = line.score.shape[1:]
    groups = heads // kv_heads
    steps = numbers.new_empty(batch, kv_heads, groups, length, tokens)
    rows, columns = block_size(length * groups, 64), 64
    with torch.cuda.device_of(steps):
        _logarithms[(batch * kv_heads, block_count(length * groups, rows), block_count(tokens, columns))](
            *(numbers, unit, *coded(coder, line.key, line.key_scale), tables_on(steps.device), steps),
            *(groups * length, tokens, per_step),
            CODER=Coding.of(coder),
            ROWS=rows,
            TOKENS=columns,
            enable_fp_fusion=False,
        )
    return steps


@triton.jit
def _logarithms(
    numbers,  # [units, G, L, blocks, block]
    unit,  # [units, G, L, blocks]
    key,  # [units, S, bytes]
    key_scale,  # [units, S, blocks]
    key_constants,
    tables,
    steps,  # [units, G, L, S], to be filled
    rows,
    tokens,
    per_step,
    CODER: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program per unit, a KV head of a batch row, block of queries and block of tokens."""
    BLOCK: tl.constexpr = CODER.block
    BLOCKS: tl.constexpr = CODER.blocks
    unit_of = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    n = tl.arange(0, LEAST)
    is_row, is_token = i < rows, j < tokens
    row, token = unit_of * rows + i, unit_of * tokens + j
    here = is_row[:, None] & (n < BLOCK)[None, :]
    scores = tl.zeros([ROWS, TOKENS], tl.float32)
    bits_of_blocks = at(key_constants, CODER.bits, tl.uint8)
    codes = key + token * CODER.size
    for block in range(0, BLOCKS):
        bits = tl.load(bits_of_blocks + block).to(tl.int32)
        own = tl.load(numbers + ((row * BLOCKS + block) * BLOCK)[:, None] + n[None, :], mask=here, other=0.0)
        found = tl.dot(own.to(tl.float16), keys_of(codes, bits, tables, is_token, BLOCK).to(tl.float16))
        found *= tl.load(unit + row * BLOCKS + block, mask=is_row, other=0.0)[:, None]
        scores += found * units_of(key_scale + token * BLOCKS + block, tables, is_token)[None, :]
        codes += bits * (BLOCK // 8)
    here = is_row[:, None] & is_token[None, :]
    tl.store(steps + row[:, None] * tokens + j[None, :], weight_step(scores, per_step), mask=here)


@triton.jit
def weight_step(scores, per_step):
    """Logarithms of weights in whole steps."""
    return tl.minimum(tl.maximum(rounded(scores * per_step), -_MOST_STEPS), _MOST_STEPS)


@triton.jit
def _select_survivors(
    steps,  # [units, G, L, S]
    real,  # [B, L]
    score,  # [units, S]
    weights,
    index,  # [units, S - L], to be filled, as all below
    after,  # [units, S - L]
    evicted_at,  # [units, S]
    kv_heads,
    groups,
    length,
    tokens,
    newest,
    GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program per unit walks from query to query. Lanes are tokens, the oldest first: the last may not go."""
    unit = tl.program_id(0).to(tl.int64)
    g, t = tl.arange(0, GROUPS), tl.arange(0, TOKENS)
    is_token, is_head, places = t < tokens, g < groups, tokens - length
    here = tl.where(t < places, places - 1 - t, t)  # of the line, where the newest of the tier come first
    steps += unit * groups * length * tokens
    drawn = tl.load(score + unit * tokens + here, mask=is_token, other=-1).to(tl.int32)
    goes = tl.full([TOKENS], _NEVER, tl.int32)
    free = tl.sum(((t < places) & (drawn < 0)).to(tl.int32), axis=0)
    last = places - newest - tl.where(t < places, free, 0)  # of those that may go, before any enters
    for n in range(0, length):
        may_go = (t < places + n) & ((t <= last + n) | (drawn < 0)) & (goes == _NEVER)
        enters = tl.load(score + unit * tokens + places + n) >= 0  # padding does not
        goes = tl.where(t == tl.where(enters, lowest(drawn, may_go, TOKENS), places + n), n, goes)
        if tl.load(real + unit // kv_heads * length + n):
            there = (t <= places + n) & (goes == _NEVER) & (drawn >= 0)
            row = steps + ((g * length + n) * tokens)[:, None] + here[None, :]
            drawn = drawn_by(row, is_head, drawn, there, weights)
    tl.store(evicted_at + unit * tokens + here, goes, mask=is_token)
    stays = is_token & (goes == _NEVER)
    place = places - tl.cumsum((stays & (drawn >= 0)).to(tl.int32), axis=0)
    place = unit * places + tl.where(drawn < 0, here, place)
    tl.store(index + place, here.to(tl.int64), mask=stays)
    tl.store(after + place, drawn.to(tl.int16), mask=stays)


@triton.jit
def lowest(score, may_go, TOKENS: tl.constexpr):
    """Which of the tokens that may go has the lowest score [TOKENS]; of several the first."""
    t = tl.arange(0, TOKENS)
    rank = (score.to(tl.int64) + 1) * TOKENS + t  # no two alike
    return (tl.min(tl.where(may_go, rank, _LAST), axis=0) % TOKENS).to(tl.int32)


@triton.jit
def drawn_by(
    steps,  # [GROUPS, TOKENS], where the logarithms of the weights stand
    is_head,  # [GROUPS]
    score,  # [TOKENS]
    there,  # [TOKENS]
    weights,  # by steps
):
    """Scores of the tokens that are there after a query of each head; the others' as they are."""
    asked = is_head[:, None] & there[None, :]
    near = tl.where(asked, tl.load(steps, mask=asked, other=0.0), -2 * _MOST_STEPS)
    below = tl.minimum(tl.max(near, axis=1)[:, None] - near, _LEAST_STEPS)
    weight = tl.where(asked, tl.load(weights + below.to(tl.int32)), 0.0)
    share = tl.div_rn(weight, tl.maximum(tl.sum(weight, axis=1), 1.0)[:, None])
    gain = tl.sum(rounded(share * share * _GAIN), axis=0).to(tl.int32)
    decayed = score - (score + _DECAY - 1) // _DECAY
    return tl.where(there, tl.minimum(decayed + gain, _MOST_SCORE), score)
