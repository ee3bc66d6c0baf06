"""Exact prefill on a GPU: flash attention and the kernel of squared weights, against the same in plain torch."""

from __future__ import annotations

import pytest
import torch
from device import DEVICE, INTERPRETED, calls_of_kernels, needs_device

from dofla.attention import Moments
from dofla.attention.constants import LOG_ZERO
from dofla.feature_maps.layer import LinearAttention

pytestmark = [needs_device, pytest.mark.interpreter]
SCALING, DIM, HEADS, GROUPS = 0.2, 32, 2, 2


@pytest.mark.parametrize("dim", [24, 64])
@pytest.mark.parametrize(("length", "neighbors"), [(70, 1), (100, 17), (200, 64)])
def test_squared_weights_are_those_of_plain_torch(dim, length, neighbors):
    from dofla.attention.gpu.drawn import drawn

    held, generator = 30, torch.Generator().manual_seed(0)
    query = torch.randn(2, HEADS * GROUPS, length, dim, generator=generator)
    key = torch.randn(2, HEADS, held + length, dim, generator=generator)
    real = torch.rand(2, held + length, generator=generator) > 0.2
    real[:, held:] = True
    scores = query.double().unflatten(1, (HEADS, -1)) @ key.double().unsqueeze(2).mT * SCALING
    distance = torch.arange(held, held + length)[:, None] - torch.arange(held + length)
    scores = scores.masked_fill((distance < 0) | ~real[:, None, None, None], LOG_ZERO)
    right = scores.softmax(-1).square().masked_fill(distance < neighbors, 0).sum((2, 3))
    normalizer = scores.logsumexp(-1).flatten(1, 2).float()
    with calls_of_kernels():
        found = drawn(*(x.to(DEVICE) for x in (query, key, real, normalizer)), neighbors, SCALING)
    # Products of ten bits (TF32): scores are off by 2^-10 of the sum of their terms.
    error = 2.0**-9 * float((query.abs().amax() * key.abs().amax()) * SCALING * dim**0.5)
    assert (found.cpu() - right).abs().max() <= error * right.max()


@pytest.mark.skipif(INTERPRETED, reason="the interpreter multiplies no bfloat16 numbers")
def test_a_prefill_retains_what_it_retains_on_a_cpu():
    layer = LinearAttention("none", [0] * HEADS, DIM, 10, 2, "int8", [[(6, 3.0)]] * HEADS, [20, 40], DIM)
    generator = torch.Generator().manual_seed(0)
    layer.reset_parameters(generator)
    for tiers in layer.coded_tiers.values():
        for coder in (tiers.key, tiers.value):
            coder.calibrate(Moments.of(torch.randn(coder.heads, 200, DIM, generator=generator)))
    layer.requires_grad_(False)
    sizes = (HEADS * GROUPS, HEADS, HEADS)
    calls = [[torch.randn(1, n, length, DIM, generator=generator).bfloat16() for n in sizes] for length in (150, 60)]
    right, states = [], None
    for call in calls:
        out, states = layer(*call, scaling=SCALING, states=states, exact=True)
        right.append((out, states))
    layer.to(DEVICE)
    with calls_of_kernels():
        states = None
        for call, (out, after) in zip(calls, right, strict=True):
            found, states = layer(*(x.to(DEVICE) for x in call), scaling=SCALING, states=states, exact=True)
            assert (found.cpu().float() - out.float()).abs().max() <= 2**-5
            for n, pair in enumerate(zip(states, after, strict=True)):
                one, other = (layer.layout_of(n).opened(state.map(torch.Tensor.cpu)).tiers[-1] for state in pair)
                # Codes of a token that both hold are the same, but where a score differs in its last digits another
                # token may be retained.
                held, expected = (set(map(bytes, x.key[0, 0].numpy())) for x in (one, other))
                assert len(held & expected) >= 0.8 * len(expected)
    layer.to("cpu")
