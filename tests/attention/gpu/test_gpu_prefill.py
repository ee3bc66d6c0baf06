"""Exact prefill on a GPU: flash attention and the kernels beside it, against the same in plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from arithmetic import sum_error
from device import DEVICE, INTERPRETED, calls_of_kernels, needs_device
from dofla.feature_maps.layer import LinearAttention

from dofla.attention import Coder, Moments
from dofla.attention.constants import LOG_ZERO
from dofla.attention.drawn import Line, exact_causal

pytestmark = [needs_device, pytest.mark.interpreter]
SCALING, DIM, HEADS, GROUPS = 0.2, 32, 2, 2


def inputs_of(length: int, dim: int, held: int = 30) -> tuple[torch.Tensor, ...]:
    """Queries, keys, which tokens are real, and scores in float64 [B, Hkv, G, L, P]."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, HEADS * GROUPS, length, dim, generator=generator)
    key = torch.randn(2, HEADS, held + length, dim, generator=generator)
    real = torch.rand(2, HEADS, held + length, generator=generator) > 0.2
    real[..., held:] = True
    return query, key, real, query.double().unflatten(1, (HEADS, -1)) @ key.double().unsqueeze(2).mT * SCALING


@pytest.mark.parametrize("dim", [24, 64])
@pytest.mark.parametrize(("length", "window", "sinks"), [(70, 1, 0), (100, 17, 3), (600, 70, 4)])
def test_squared_weights_are_those_of_plain_torch(dim, length, window, sinks):
    from dofla.attention.gpu.drawn import drawn

    query, key, real, scores = inputs_of(length, dim)
    line = Line(key, torch.zeros_like(key), real, padded=False)
    _, right = exact_causal(query.double(), replace(line, key=key.double(), value=key.double()), window, sinks, SCALING)
    distance = torch.arange(30, 30 + length)[:, None] - torch.arange(30 + length)
    hidden = (distance < 0) | ~real[:, :, None, None]
    normalizer = scores.masked_fill(hidden, LOG_ZERO).logsumexp(-1).flatten(1, 2).float()
    line = Line(*(x.to(DEVICE) for x in (key, line.value, real)), padded=False)
    with calls_of_kernels():
        found = drawn(query.to(DEVICE), line, normalizer.to(DEVICE), window, sinks, SCALING)
    # Products of ten bits (TF32): scores are off by 2^-10 of the sum of their terms.
    error = 2.0**-9 * float((query.abs().amax() * key.abs().amax()) * SCALING * dim**0.5)
    for one, other in ((found.total, right.total), (found.lately, right.lately)):
        assert (one.cpu() - other).abs().max() <= error * other.max()


@pytest.mark.parametrize("nearest", [0, 40])
def test_log_normalizers_are_those_of_plain_torch(nearest):
    from dofla.attention.gpu.drawn import normalizers

    query, key, real, scores = inputs_of(90, 32)
    real[:, :, :8] = False
    distance = torch.arange(30, 120)[:, None] - torch.arange(120)
    right = scores.masked_fill((distance < nearest) | ~real[:, :, None, None], -torch.inf).logsumexp(-1).flatten(1, 2)
    with calls_of_kernels():
        found = normalizers(*(x.to(DEVICE) for x in (query, key, real)), nearest, SCALING).cpu()
    sees = right > -torch.inf
    assert torch.equal(sees, found > -torch.inf)
    error = 2.0**-9 * float((query.abs().amax() * key.abs().amax()) * SCALING * 32**0.5)
    assert (found[sees] - right[sees]).abs().max() <= error


@pytest.mark.parametrize("dim", [8, 40, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_are_packed_bit_for_bit(dim, dtype):
    from dofla.attention import eight_bits
    from dofla.attention.gpu.pack import pack

    x = torch.randn(2, 3, 50, dim, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-25, 25)[:, None]
    x[0, 0, 0], x = 0.0, x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
    with calls_of_kernels():
        found = pack(x.to(DEVICE))
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, eight_bits.pack(x), strict=True))


@pytest.mark.parametrize(("dim", "bits"), [(64, 3.0), (40, 2.0), (128, 3.5)])
def test_codes_are_decoded_as_by_plain_torch(dim, bits):
    from dofla.attention.gpu.codes import Codes
    from dofla.attention.gpu.unrotate import unrotated

    generator = torch.Generator().manual_seed(0)
    coder = Coder(HEADS, dim, [bits])
    x = torch.randn(2, HEADS, 45, dim, generator=generator) * torch.linspace(3, 0.1, dim) + 0.5
    coder.calibrate(Moments.of(x.transpose(0, 1).flatten(1, 2)))
    codes = coder.encode(x)
    right = coder.unrotate(coder.decode(*codes, 0).double())
    coder.to(DEVICE)
    with calls_of_kernels():
        found = unrotated(coder, Codes.of(coder, *(part.to(DEVICE) for part in codes), 0)).cpu()
    assert (found - right).abs().max() <= sum_error(dim, float(right.abs().max()) * 8)


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
