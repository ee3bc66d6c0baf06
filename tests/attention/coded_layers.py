"""Layers with a compressed cache, calibrated on random vectors, and how far kernels may be from float64."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from arithmetic import sum_error
from dofla.feature_maps.layer import LinearAttention
from forms import KernelCalls
from hypothesis import strategies as st

from dofla.attention import Moments, compiled
from dofla.attention.coding.operations import PLAIN

SCALING = 0.3
SIZES = st.sampled_from([8, 16, 24, 32, 40, 64, 80, 128, 256])
TIERS = [((3, 4.0),), ((4, 4.0), (17, 2.5)), ((2, 5.0), (3, 3.0), (50, 1.0)), ((20, 3.25), (9, 1.5))]
"""Of tokens and bits; 2.5 bits and the like are whole ones of each block."""
LAYERS = st.fixed_dictionaries(
    {
        "head_dim": SIZES,
        "value_dim": SIZES,
        "window": st.sampled_from([1, 5, 17]),
        "sinks": st.sampled_from([0, 2]),
        "tiers": st.lists(st.sampled_from(TIERS), min_size=1, max_size=3),
        "features": st.sampled_from([0, 4]),
        "heavy_hitters": st.sampled_from([0, 1, 20, 70]),
    }
)
WIDE = {"head_dim": 256, "value_dim": 256, "window": 17, "sinks": 2, "tiers": [TIERS[0]] * 2}


def layer_of(seed, head_dim, value_dim, window, sinks, tiers, features, heavy_hitters=0):
    """Calibrated on falling variances off center; a head for each of ``tiers``."""
    heads, generator = len(tiers), torch.Generator().manual_seed(seed)
    kind = "prf" if features else "none"
    layer = LinearAttention(
        kind, [features] * heads, head_dim, window, sinks, "int8", tiers, [heavy_hitters] * heads, value_dim
    )
    layer.reset_parameters(generator)
    for coded_tiers in layer.coded_tiers.values():
        for coder in (coded_tiers.key, coded_tiers.value):
            fall = torch.exp(-3 * torch.arange(coder.dim) / coder.dim)
            coder.calibrate(Moments.of(torch.randn(coder.heads, 200, coder.dim, generator=generator) * fall))
    return layer.requires_grad_(False)


def vectors(seed, layer, batch, groups, length, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    heads, coded_tiers = len(layer.features), next(iter(layer.coded_tiers.values()))

    def random(heads, dim):
        return torch.randn(batch, length, heads, dim, generator=generator).to(dtype).transpose(1, 2)

    return (
        random(heads * groups, coded_tiers.key.dim),
        random(heads, coded_tiers.key.dim),
        random(heads, coded_tiers.value.dim),
    )


def run(layer, inputs, weight, cuts, kernels=True):
    """Outputs of a text read in pieces, and the states after each; and what ran."""
    states, pieces, found = None, [], []
    with pytest.MonkeyPatch.context() as patch, KernelCalls() as calls:
        if not kernels:
            patch.setattr(compiled, "usable", lambda *_: False)
        for part in (slice(a, b) for a, b in pairwise(cuts)):
            own = None if weight is None else weight[:, part]
            out, states = layer(*(x[:, :, part] for x in inputs), scaling=SCALING, weight=own, states=states)
            pieces.append(out)
            found.append(states)
    return torch.cat(pieces, 2), found, calls


def assert_same_codes(ours, theirs):
    """Features left out, whose sums are in another order."""
    for mine, plain in zip(ours, theirs, strict=True):
        for a, b in zip(mine, plain, strict=True):
            assert torch.equal(a.tokens, b.tokens)


def error_of(layer, query, key, value):
    """How far outputs may be from those of float64, coded tokens being the same: what is rounded is float32, and where
    inputs are bfloat16 what is multiplied may be, too."""
    scores, unrotated = 0.0, value.double().norm(dim=-1).max().item()
    size = SCALING * query.double().norm(dim=-1).max().item()
    share = query.shape[1] // key.shape[1]
    spread = SCALING * pairs(query, key.repeat_interleave(share, 1))
    for group, coded_tiers in zip(layer.groups, layer.coded_tiers.values(), strict=True):
        # Of rotated vectors, and of the way back: by Cauchy and Schwarz no sum of sizes is larger than their product.
        keys, values = (
            PLAIN.chain(coder, x[:, group].float()) for coder, x in ((coded_tiers.key, key), (coded_tiers.value, value))
        )
        rotated = [
            coded_tiers.key.rotation.double() * coded_tiers.key.fineness.double().unsqueeze(-1) @ x.double().mT
            for x in keys
        ]
        back = coded_tiers.key.back.double().flatten(1).norm(dim=1).max().item() / coded_tiers.key.dim**0.5
        longest = max(x.norm(dim=-2).max().item() for x in rotated) + coded_tiers.key.middle.norm(dim=-1).max().item()
        scores = max(scores, size * (back * longest + key.double().norm(dim=-1).max().item()))
        unrotated = max(unrotated, *(2 * x.double().norm(dim=-1).max().item() for x in values))
        asked, _ = coded_tiers.key.rotate_query(query.unflatten(1, (-1, share))[:, group].flatten(1, 2).double())
        coded = [coded_tiers.key.rotate(x.double()).repeat_interleave(share, 1) for x in keys]
        spread = max(spread, *(SCALING * pairs(asked, x) for x in coded))
    # Roundings of n numbers are of either sign: a sum is off by a few times √n of them (Higham and Mary 2019), of which
    # weights have those of scores, and averages those of weights twice and their own.
    tokens = sum(count for count, _ in TIERS[2]) + 19 + 70
    of_scores = sum_error(4 * (2 * key.shape[-1] + 8) ** 0.5, scores)
    of_averages = sum_error(4 * (tokens + value.shape[-1] + 16) ** 0.5)
    if query.dtype == torch.bfloat16:
        half = torch.finfo(query.dtype).eps / 2  # of each factor, and of what comes out
        of_scores, of_averages = of_scores + 4 * 2**0.5 * half * spread, of_averages + 3 * half
    return (math.expm1(2 * of_scores) + of_averages) * unrotated


def pairs(query, key):
    """The largest root of the sum of squares of what a score adds up, over queries and keys [B, H, L, d]."""
    return (query.double().square() @ key.double().square().mT).amax().sqrt().item()
