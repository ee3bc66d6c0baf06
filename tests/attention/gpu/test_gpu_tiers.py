"""Attention to codes by the Triton kernel, against plain torch in float64 from the same codes."""

from __future__ import annotations

import copy

import pytest
import torch
from arithmetic import sum_error
from device import DEVICE, needs_device

from dofla.attention import LOG_ZERO, CodedTokens, Fading, KeptTokens, Moments
from dofla.attention.coding.heavy_hitters import NEVER

pytestmark = needs_device

SCALING = 0.3
SIZES = [  # head size, value size, bits
    (8, 24, 1.0),
    (24, 8, 2.5),
    (16, 64, 3.0),
    (64, 40, 4.25),
    (128, 80, 2.0),
    (80, 128, 5.0),
]


def coded(seed, batch, heads, count, head_dim, value_dim, bits):
    """A memory of one stage, and ``count`` tokens in it; row 1 of a batch begins with padding."""
    generator = torch.Generator().manual_seed(seed)
    fading = Fading(heads, head_dim, value_dim, [(7, bits)])
    codes = []
    for coder in (fading.key, fading.value):
        fall = torch.exp(-3 * torch.arange(coder.dim) / coder.dim)
        x = torch.randn(batch, heads, count, coder.dim, generator=generator) * fall + 0.3
        coder.calibrate(Moments.of(x.transpose(0, 1).flatten(1, 2)))
        codes += coder.encode(x)
    log_weight = torch.randn(batch, count, generator=generator)
    log_weight[1:, : count // 2] = LOG_ZERO
    return fading, CodedTokens(*codes, log_weight)


def check(fading, line, turned, gone):
    """In float32 by the kernel, as in float64 by plain torch."""
    found = copy.deepcopy(fading).to(DEVICE)
    own = line.map(lambda x: x.to(DEVICE))
    key, value = (
        coder.for_kernels(codes, scales, 0)
        for coder, codes, scales in (
            (found.key, own.key, own.key_scale),
            (found.value, own.value, own.value_scale),
        )
    )
    from dofla.attention.gpu.tiers import attend

    going = None if gone is None else gone.to(DEVICE, torch.int32)
    out, normaliser = (x.cpu().double() for x in attend(turned.to(DEVICE), key, value, own.log_weight, going, SCALING))
    wanted, wanted_normaliser = fading._see(turned.double(), line, 0, None, gone, SCALING)
    nobody = wanted_normaliser < LOG_ZERO / 2
    # Roundings of n numbers are of either sign: a sum is off by a few times √n of them (Higham and Mary 2019). Three
    # products of TF32, for one of float32, leave out up to 2⁻²⁰ of it, perhaps always the same way.
    keys = fading.key.decode(line.key, line.key_scale, 0)
    size = SCALING * turned.norm(dim=-1).max().item() * (keys.norm(dim=-1).max().item() + 1) + 4  # 4 for log-weights
    of_scores = sum_error(4 * (keys.shape[-1] + 3) ** 0.5 + 8, size)
    of_weights = sum_error(4 * (len(line) + 3) ** 0.5 + 8)
    most = fading.value.decode(line.value, line.value_scale, 0).abs().max().item()
    assert (out - wanted).abs().max() < 2 * (of_scores + of_weights) * most
    assert ((normaliser - wanted_normaliser).abs() * ~nobody).max() < of_scores + of_weights + sum_error(2, size)
    assert (normaliser[nobody] == LOG_ZERO).all()
    assert (out[nobody] == 0).all()
    return nobody


@pytest.mark.parametrize("length", [1, 37])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_line_of_tokens_that_go_as_they_came(sizes, groups, length):
    fading, line = coded(0, 2, 2, 7 + length, *sizes)
    turned = torch.randn(2, 2 * groups, length, sizes[0] + 1, generator=torch.Generator().manual_seed(1))
    nobody = check(fading, line, turned, None)
    assert nobody.any() == (length > 1)  # the first queries of the row that begins with padding


@pytest.mark.parametrize("length", [1, 37])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_line_of_tokens_that_go_when_they_must(sizes, groups, length):
    fading, line = coded(0, 2, 2, 40 + length, *sizes)
    kept, generator = KeptTokens.of(line), torch.Generator().manual_seed(1)
    gone = torch.randint(0, 2 * length, (2, 2, len(line)), generator=generator)
    gone = torch.where(gone < length, gone, NEVER)
    gone[0, 1] = 0
    turned = torch.randn(2, 2 * groups, length, sizes[0] + 1, generator=generator)
    nobody = check(fading, kept, turned, gone)
    assert nobody[0, groups:].all()


def test_queries_of_any_strides():
    """As parts of a call are."""
    fading, line = coded(0, 1, 2, 20, 16, 24, 3.0)
    turned = torch.randn(1, 2, 29, 17, generator=torch.Generator().manual_seed(1))
    check(fading, line, turned[:, :, 4:17], None)
    check(fading, line, turned[:, :, 4:17].mT.contiguous().mT, None)


def test_scores_of_thousands():
    """Weights that are 0 beside others, before and after those."""
    fading, line = coded(0, 1, 1, 100, 16, 16, 3.0)
    check(fading, line, 1e3 * torch.randn(1, 1, 60, 17, generator=torch.Generator().manual_seed(1)), None)
