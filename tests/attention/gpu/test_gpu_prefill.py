"""Exact prefill on a GPU: flash attention and the kernels beside it, against the same in plain torch."""

from dataclasses import replace

import pytest
import torch
from device import DEVICE, INTERPRETED, calls_of_kernels, needs_device
from gpu_caches import heads_of, moved, text_of

from dofla.attention import Call
from dofla.attention.constants import LOG_ZERO
from dofla.attention.drawn import Line, exact_causal

pytestmark = [needs_device, pytest.mark.interpreter]
SCALING, HEADS, GROUPS, HELD = 0.2, 2, 2, 30


def inputs_of(length: int, dim: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys, which tokens are real, scores in float64 [B, Hkv, G, L, P] and how far they may be off by products
    of ten bits (TF32): by 2^-10 of the sum of their terms."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, length, HEADS * GROUPS, dim, generator=generator).transpose(1, 2)  # as models have them
    key = torch.randn(2, HEADS, HELD + length, dim, generator=generator)
    real = torch.rand(2, HEADS, HELD + length, generator=generator) > 0.2
    real[..., HELD:] = True
    scores = query.double().unflatten(1, (HEADS, -1)) @ key.double().unsqueeze(2).mT * SCALING
    return query, key, real, scores, 2.0**-9 * float(query.abs().amax() * key.abs().amax() * SCALING * dim**0.5)


def distance_of(length: int) -> torch.Tensor:
    """How far behind each query a token is."""
    return torch.arange(HELD, HELD + length)[:, None] - torch.arange(HELD + length)


def rank_of(real: torch.Tensor) -> torch.Tensor:
    """How many tokens stand before each, negative for those that are not real."""
    return (real.cumsum(-1) - 1).masked_fill(~real, -1)


@pytest.mark.parametrize("dim", [24, 64])
@pytest.mark.parametrize(("length", "window", "sinks"), [(70, 1, 0), (100, 17, 3), (600, 70, 4)])
def test_squared_weights_are_those_of_plain_torch(dim, length, window, sinks):
    from dofla.attention.gpu.drawn import drawn

    query, key, real, scores, error = inputs_of(length, dim)
    line = Line(key, torch.zeros_like(key), rank_of(real), padded=False)
    _, right = exact_causal(query.double(), replace(line, key=key.double(), value=key.double()), window, sinks, SCALING)
    hidden = (distance_of(length) < 0) | ~real[:, :, None, None]
    normalizer = scores.masked_fill(hidden, LOG_ZERO).logsumexp(-1).flatten(1, 2).float()
    line = Line(*(x.to(DEVICE) for x in (key, line.value, line.rank)), padded=False)
    found = drawn(query.to(DEVICE), line, normalizer.to(DEVICE), window, sinks, SCALING)
    for one, other in ((found.total, right.total), (found.lately, right.lately)):
        assert (one.cpu() - other).abs().max() <= error * other.max()


@pytest.mark.parametrize("nearest", [0, 40])
def test_log_normalizers_are_those_of_plain_torch(nearest):
    from dofla.attention.gpu.drawn import normalizers

    query, key, real, scores, error = inputs_of(90, 32)
    rank = rank_of(real)
    hidden = (distance_of(90) < nearest) | (rank < 5)[:, :, None, None]
    right = scores.masked_fill(hidden, -torch.inf).logsumexp(-1).flatten(1, 2)
    line = Line(*(x.to(DEVICE) for x in (key, key, rank)), padded=False)
    found = normalizers(query.to(DEVICE), line, 5, nearest, SCALING).cpu()
    sees = right > -torch.inf
    assert torch.equal(sees, found > -torch.inf)
    assert (found[sees] - right[sees]).abs().max() <= error


@pytest.mark.parametrize(("dim", "value_dim"), [(32, 16), (320, 320)])
def test_heads_that_flash_attention_does_not_take_are_done_in_plain_torch(dim, value_dim):
    from dofla.attention.gpu.backend import Triton

    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, 20, size, generator=generator, dtype=torch.bfloat16)
        for heads, size in ((HEADS * GROUPS, dim), (HEADS, dim), (HEADS, value_dim))
    )
    line = Line(key, value, torch.arange(20).expand(1, HEADS, -1), padded=False)
    right, _ = exact_causal(query, line, 4, 1, SCALING)
    line = Line(*(x.to(DEVICE) for x in (key, value, line.rank)), padded=False)
    found, _ = Triton().exact_causal(query.to(DEVICE), line, 4, 1, SCALING)
    assert found.shape == (1, HEADS * GROUPS, 20, value_dim)
    assert (found.cpu().float() - right.float()).abs().max() <= 2**-6


@pytest.mark.skipif(INTERPRETED, reason="the interpreter multiplies no bfloat16 numbers")
def test_a_prefill_retains_what_it_retains_on_a_cpu():
    heads = heads_of(32, 32, [(10, 2, 6, 20), (10, 2, 6, 40)])
    text, own = text_of(heads, 1, 210, GROUPS, torch.bfloat16), moved(heads)
    state = mine = None
    for part in (slice(0, 150), slice(150, 210)):
        call = Call(*(x[:, :, part] for x in text), SCALING, exact=True)
        out, state = heads.step(call, state)
        with calls_of_kernels():
            found, mine = own.step(Call(*moved(list(call.vectors)), SCALING, exact=True), mine)
        assert (found.cpu().float() - out.float()).abs().max() <= 2**-5
        for one, other in zip(*(heads.layout.open(x.map(torch.Tensor.cpu)) for x in (mine, state)), strict=True):
            # Codes of a token that both hold are the same, but where a score differs in its last digits another token
            # may be retained.
            held, expected = (set(map(bytes, x.tier.key[0, 0].numpy())) for x in (one, other))
            assert len(held & expected) >= 0.8 * len(expected)
