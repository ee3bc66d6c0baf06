"""Compressed caches that are calibrated on random vectors, what they hold, and how far kernels may be from float64."""

import math
from itertools import pairwise

import pytest
import torch
from arithmetic import sum_error
from forms import KernelCalls
from hypothesis import strategies as st

from dofla.attention import Call, CompressedHeads, HeadSizes, Moments, compiled, log_weights
from dofla.attention.naive_cache import NaiveCache

SCALING = 0.3
DIMS = st.sampled_from([8, 16, 24, 32, 40, 64, 80, 128, 256])
SIZE = HeadSizes(window=5, sinks=2, newest=6, heavy_hitters=9)
MOST = HeadSizes(window=17, sinks=2, newest=20, heavy_hitters=40)
HEADS = st.fixed_dictionaries(
    {
        "sizes": st.lists(
            st.builds(
                HeadSizes,
                window=st.sampled_from([1, 5, MOST.window]),
                sinks=st.sampled_from([0, MOST.sinks]),
                newest=st.sampled_from([1, 6, MOST.newest]),
                heavy_hitters=st.sampled_from([0, 1, 9, MOST.heavy_hitters]),  # 0: grows
            ),
            min_size=1,
            max_size=3,
        ),
        "head_dim": DIMS,
        "value_dim": DIMS,
        "bits": st.sampled_from([1.0, 2.5, 3.0, 5.0]),  # 2.5 bits are whole ones of each block
    }
)


def heads_of(seed=0, sizes=(SIZE, SIZE), head_dim=16, value_dim=24, bits=3.0):
    """Calibrated on falling variances off center."""
    generator = torch.Generator().manual_seed(seed)
    heads = CompressedHeads(list(sizes), head_dim, value_dim, bits)
    heads.reset_parameters()
    for tier in heads.tiers:
        for coder in (tier.key, tier.value):
            fall = torch.exp(-3 * torch.arange(coder.dim) / coder.dim)
            coder.calibrate(Moments.of(torch.randn(coder.heads, 200, coder.dim, generator=generator) * fall + 0.3))
    return heads


def vectors(seed, heads, batch, groups, length, dtype=torch.float32):
    """Queries, keys and values."""
    generator = torch.Generator().manual_seed(seed)
    count, tier = len(heads.heads), heads.tiers[0]
    shapes = (count * groups, tier.key.dim), (count, tier.key.dim), (count, tier.value.dim)
    return [torch.randn(batch, length, *shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes]


def step(heads, inputs, state=None, weight=None, **options):
    """A call of these heads."""
    log_weight = None if weight is None else log_weights(weight)
    return heads.step(Call(*inputs, SCALING, log_weight, **options), state)


def run(heads, inputs, cuts, weight=None, kernels=True, **options):
    """Outputs of a text that is read in pieces, the states after each; and what ran."""
    state, pieces, states = None, [], []
    with pytest.MonkeyPatch.context() as patch, KernelCalls() as calls:
        patch.setattr("dofla.attention.layout.LEAST_SLOTS", 16)
        if not kernels:
            patch.setattr(compiled, "usable", lambda *_: False)
        for part in (slice(a, b) for a, b in pairwise(cuts)):
            own = None if weight is None else weight[:, part]
            given = {"room": part.stop} | options
            out, state = step(heads, [x[:, :, part] for x in inputs], state, own, **given)
            pieces.append(out)
            states.append(state)
    return torch.cat(pieces, 2), states, calls


def padded(padding, length):
    """Key weights [B, L] of sequences with so much padding in front."""
    return (torch.arange(length) >= torch.tensor(padding)[:, None]).float()


def naive(heads, inputs, padding=None):
    """Outputs in float64 of caches that are read token by token, and the caches of each group and sequence."""
    query, key, value = inputs
    out, caches = value.new_zeros(*query.shape[:3], value.shape[-1], dtype=torch.float64), []
    for size, own, tier in zip(heads.layout.sizes, heads.layout.heads, heads.tiers, strict=True):
        caches.append([])
        for n, first in enumerate(padding or [0] * len(query)):
            cache = NaiveCache(size, tier, SCALING)
            asked, k, v = query[n].unflatten(0, (len(heads.heads), -1))[own], key[n, own], value[n, own]
            for token in range(first, query.shape[2]):
                found = cache.step(asked[:, :, token], k[:, token], v[:, token])
                out[n].unflatten(0, (len(heads.heads), -1))[own, :, token] = found
            caches[-1].append(cache)
    return out, caches


def assert_holds(heads, state, caches):
    """The state holds the tokens of naive caches, bit for bit, and their scores."""
    for contents, group in zip(heads.layouts.of(state.rows.shape[-1]).open(state), caches, strict=True):
        for n, cache in enumerate(group):
            for exact, held in ((contents.window, cache.window), (contents.sinks, cache.sinks)):
                tokens = None if exact is None else exact.unpacked(torch.float64)
                there = 0 if tokens is None else int((tokens.log_weight[n] == 0).sum())
                assert there == (0 if held is None else held[0].shape[1])
                if held is not None:
                    places = tokens.log_weight[n] == 0
                    assert torch.equal(tokens.key[n, :, places], held[0])
                    assert torch.equal(tokens.value[n, :, places], held[1])
            count = cache.scores.shape[-1]
            free = contents.tier.score.shape[-1] - count
            assert (contents.tier.score[n, :, :free] < 0).all()
            if count:
                assert torch.equal(contents.tier.score[n, :, free:].float(), cache.scores)
                (key, key_scale), (value, value_scale) = cache.codes
                codes = {"key": key, "key_scale": key_scale, "value": value, "value_scale": value_scale}
                assert all(torch.equal(getattr(contents.tier, x)[n, :, free:], own) for x, own in codes.items())


def error_of(heads, query, key, value):
    """How far outputs may be from those of float64, coded tokens being the same: what is rounded is float32, and where
    inputs are bfloat16 what is multiplied may be, too."""
    scores, unrotated = 0.0, value.double().norm(dim=-1).max().item()
    size = SCALING * query.double().norm(dim=-1).max().item()
    share = query.shape[1] // key.shape[1]
    spread = SCALING * _pairs(query, key.repeat_interleave(share, 1))
    for own, tier in zip(heads.layout.heads, heads.tiers, strict=True):
        # Of rotated vectors, and of the way back: by Cauchy and Schwarz no sum of sizes is larger than their product.
        keys, values = (
            coder.unrotate(coder.decode(*coder.encode(x[:, own].float())))
            for coder, x in ((tier.key, key), (tier.value, value))
        )
        rotated = tier.key.rotation.double() * tier.key.fineness.double().unsqueeze(-1) @ keys.double().mT
        back = tier.key.back.double().flatten(1).norm(dim=1).max().item() / tier.key.dim**0.5
        longest = rotated.norm(dim=-2).max().item() + tier.key.middle.norm(dim=-1).max().item()
        scores = max(scores, size * (back * longest + key.double().norm(dim=-1).max().item()))
        unrotated = max(unrotated, 2 * values.double().norm(dim=-1).max().item())
        asked, _ = tier.key.rotate_query(query.unflatten(1, (-1, share))[:, own].flatten(1, 2).double())
        coded = (rotated.mT - tier.key.middle.double().unsqueeze(1)).repeat_interleave(share, 1)
        spread = max(spread, SCALING * _pairs(asked, coded))
    # Roundings of n numbers are of either sign: a sum is off by a few times √n of them (Higham and Mary 2019), of which
    # weights have those of scores, and averages those of weights twice and their own.
    of_scores = sum_error(4 * (2 * key.shape[-1] + 8) ** 0.5, scores)
    of_averages = sum_error(4 * (sum(MOST) + value.shape[-1] + 16) ** 0.5)
    if query.dtype == torch.bfloat16:
        half = torch.finfo(query.dtype).eps / 2  # of each factor, and of what comes out
        of_scores, of_averages = of_scores + 4 * 2**0.5 * half * spread, of_averages + 3 * half
    of_weights = math.expm1(min(2 * of_scores, 700))  # so large a bound asks nothing, and float64 holds no more
    return (of_weights + of_averages) * unrotated


def _pairs(query, key):
    """The largest root of the sum of squares of what a score adds up, over queries and keys [B, H, L, d]."""
    return (query.double().square() @ key.double().square().mT).amax().sqrt().item()
