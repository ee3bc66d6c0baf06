"""Compressed caches of random vectors, read on the CPU by what takes them there, and by the Triton kernels."""

import copy
from itertools import pairwise

import torch
from device import DEVICE, calls_of_kernels

from dofla.attention import Call, CompressedHeads, CompressedState, HeadSizes, Moments, log_weights

SCALING = 0.3
# Sizes of keys and values; window, sinks, newest and heavy hitters of each KV head; bits; and tokens read before.
CACHES = {
    "alike": (16, 24, [(3, 2, 4, 5)] * 2, 3.0, 14),
    "others in each head": (16, 24, [(3, 2, 4, 5), (4, 1, 3, 6)], 2.5, 14),
    "tiers of other sizes": (16, 24, [(3, 2, 4, kept) for kept in (5, 9, 5, 2)], 3.0, 14),
    "one that grows": (16, 24, [(3, 2, 4, 5), (3, 2, 4, 0)], 3.0, 14),
    "no sinks": (24, 8, [(3, 0, 4, 5)] * 2, 3.0, 14),
    "while sinks fill": (8, 16, [(5, 4, 4, 5)] * 2, 3.0, 3),
    "from the first token on": (8, 8, [(2, 2, 2, 3)] * 2, 3.0, 0),
    "more than a tile": (40, 32, [(40, 2, 14, 45)] * 2, 3.0, 90),
}


def cache_of(name: str) -> tuple[CompressedHeads, int]:
    """The heads of a name, and how many tokens they read first."""
    *shape, before = CACHES[name]
    return heads_of(*shape), before


def heads_of(head_dim: int, value_dim: int, sizes, bits: float = 3.0) -> CompressedHeads:
    """Calibrated on vectors off center."""
    generator = torch.Generator().manual_seed(0)
    heads = CompressedHeads([HeadSizes(*size) for size in sizes], head_dim, value_dim, bits)
    for tier in heads.tiers:
        for coder in (tier.key, tier.value):
            coder.calibrate(Moments.of(torch.randn(coder.heads, 300, coder.dim, generator=generator) + 0.3))
    return heads


def text_of(heads: CompressedHeads, batch: int, length: int, groups: int, dtype=torch.float32) -> list[torch.Tensor]:
    """Queries, keys and values."""
    generator, count, tier = torch.Generator().manual_seed(1), len(heads.heads), heads.tiers[0]
    sizes = (count * groups, tier.key.dim), (count, tier.key.dim), (count, tier.value.dim)
    return [torch.randn(batch, n, length, dim, generator=generator).to(dtype) for n, dim in sizes]


def read(heads, text, cuts, state=None, weight=None, in_place=False):
    """Outputs of a text read in parts, by whatever takes them, and the state after."""
    out = []
    for a, b in pairwise(cuts):
        log_weight = None if weight is None else log_weights(weight[:, a:b])
        call = Call(*(x[:, :, a:b] for x in text), SCALING, log_weight, in_place=in_place)
        piece, state = heads.step(call, state)
        out.append(piece)
    return torch.cat(out, 2), state


def moved(x):
    """To the device of the kernels: a module, a state, tensors in a list, or None; a copy."""
    if isinstance(x, list):
        return [moved(t) for t in x]
    if isinstance(x, CompressedState):
        return x.map(moved)
    return None if x is None else copy.deepcopy(x).to(DEVICE)


def check(heads, text, cuts, weight=None, before=0):
    """A text in parts by the kernels, after ``before`` tokens that the CPU reads: the state is that of the CPU, bit for
    bit, the state before is not changed, and outputs are as near as sums in another order. Names of what was called."""
    state = read(heads, text, [0, before], None, weight)[1] if before else None
    wanted, after = read(heads, text, cuts, state, weight)
    own, mine, held = moved(heads), moved(state), moved(state)
    with calls_of_kernels() as called:
        found, mine = read(own, moved(text), cuts, mine, moved(weight))
    assert found.dtype == text[2].dtype
    assert torch.equal(mine.rows.cpu(), after.rows)
    assert state is None or torch.equal(state.rows, held.rows.cpu())
    off = (found.cpu().double() - wanted.double()).abs()
    off = off if weight is None else off * weight[:, None, cuts[0] : cuts[-1], None]
    # Sums of some dozen numbers of the size of values, with weights that scores of the size of ten are off by; rounded
    # once to bfloat16, perhaps to a neighbor.
    eps = torch.finfo(found.dtype).eps
    assert off.max() <= (256 * eps * text[2].abs().max() if found.dtype == torch.float32 else eps * wanted.abs().max())
    return called
