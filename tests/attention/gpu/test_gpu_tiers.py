"""Attention to codes by the Triton kernel, against plain torch in float64 from the same codes."""

from __future__ import annotations

import copy

import pytest
import torch
from arithmetic import sum_error
from device import DEVICE, needs_device

from dofla.attention import LOG_ZERO, CodedTiers, CodedTokens, Moments, ScoredTokens
from dofla.attention.coding.operations import PLAIN
from dofla.attention.constants import NEVER
from dofla.attention.gpu.codes import Codes

pytestmark = needs_device

SCALING = 0.3
SIZES = [  # head size, value size, bits
    (8, 24, 1.0),
    (24, 8, 2.5),
    pytest.param((16, 64, 3.0), marks=pytest.mark.interpreter),
    (64, 40, 4.25),
    (128, 80, 2.0),
    (80, 128, 5.0),
]


def coded(seed, batch, heads, count, head_dim, value_dim, bits):
    """A memory of one tier, and ``count`` tokens in it; row 1 of a batch begins with padding."""
    generator = torch.Generator().manual_seed(seed)
    coded_tiers = CodedTiers(heads, head_dim, value_dim, [(7, bits)])
    codes = []
    for coder in (coded_tiers.key, coded_tiers.value):
        fall = torch.exp(-3 * torch.arange(coder.dim) / coder.dim)
        x = torch.randn(batch, heads, count, coder.dim, generator=generator) * fall + 0.3
        coder.calibrate(Moments.of(x.transpose(0, 1).flatten(1, 2)))
        codes += coder.encode(x)
    log_weight = torch.randn(batch, count, generator=generator)
    log_weight[1:, : count // 2] = LOG_ZERO
    return coded_tiers, CodedTokens(*codes, log_weight)


def check(coded_tiers, line, rotated, evicted_at):
    """In float32 by the kernel, as in float64 by plain torch."""
    found = copy.deepcopy(coded_tiers).to(DEVICE)
    own = line.map(lambda x: x.to(DEVICE))
    key, value = (
        Codes.of(coder, codes, scales, 0)
        for coder, codes, scales in (
            (found.key, own.key, own.key_scale),
            (found.value, own.value, own.value_scale),
        )
    )
    from dofla.attention.gpu.tiers import attend

    going = None if evicted_at is None else evicted_at.to(DEVICE, torch.int32)
    out, normalizer = (x.cpu().double() for x in attend(rotated.to(DEVICE), key, value, own.log_weight, going, SCALING))
    coders = coded_tiers.key, coded_tiers.value
    wanted, wanted_normalizer = PLAIN.attend(*coders, rotated.double(), line, 0, evicted_at, SCALING)
    nobody = wanted_normalizer < LOG_ZERO / 2
    # Roundings of n numbers are of either sign: a sum is off by a few times √n of them (Higham and Mary 2019). Three
    # products of TF32, for one of float32, leave out up to 2⁻²⁰ of it, perhaps always the same way.
    keys = coded_tiers.key.decode(line.key, line.key_scale, 0)
    size = SCALING * rotated.norm(dim=-1).max().item() * (keys.norm(dim=-1).max().item() + 1) + 4  # 4 for log-weights
    of_scores = sum_error(4 * (keys.shape[-1] + 3) ** 0.5 + 8, size)
    of_weights = sum_error(4 * (len(line) + 3) ** 0.5 + 8)
    most = coded_tiers.value.decode(line.value, line.value_scale, 0).abs().max().item()
    assert (out - wanted).abs().max() < 2 * (of_scores + of_weights) * most
    assert ((normalizer - wanted_normalizer).abs() * ~nobody).max() < of_scores + of_weights + sum_error(2, size)
    assert (normalizer[nobody] == LOG_ZERO).all()
    assert (out[nobody] == 0).all()
    return nobody


@pytest.mark.parametrize("length", [1, 37])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_line_of_tokens_that_go_as_they_came(sizes, groups, length):
    coded_tiers, line = coded(0, 2, 2, 7 + length, *sizes)
    rotated = torch.randn(2, 2 * groups, length, sizes[0] + 1, generator=torch.Generator().manual_seed(1))
    nobody = check(coded_tiers, line, rotated, None)
    assert nobody.any() == (length > 1)  # the first queries of the row that begins with padding


@pytest.mark.parametrize("length", [1, 37])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_line_of_tokens_that_go_when_they_must(sizes, groups, length):
    coded_tiers, line = coded(0, 2, 2, 40 + length, *sizes)
    kept, generator = ScoredTokens.of(line), torch.Generator().manual_seed(1)
    evicted_at = torch.randint(0, 2 * length, (2, 2, len(line)), generator=generator)
    evicted_at = torch.where(evicted_at < length, evicted_at, NEVER)
    evicted_at[0, 1] = 0
    rotated = torch.randn(2, 2 * groups, length, sizes[0] + 1, generator=generator)
    nobody = check(coded_tiers, kept, rotated, evicted_at)
    assert nobody[0, groups:].all()


@pytest.mark.interpreter
def test_queries_of_any_strides():
    """As parts of a call are."""
    coded_tiers, line = coded(0, 1, 2, 20, 16, 24, 3.0)
    rotated = torch.randn(1, 2, 29, 17, generator=torch.Generator().manual_seed(1))
    check(coded_tiers, line, rotated[:, :, 4:17], None)
    check(coded_tiers, line, rotated[:, :, 4:17].mT.contiguous().mT, None)


@pytest.mark.interpreter
def test_scores_of_thousands():
    """Weights that are 0 beside others, before and after those."""
    coded_tiers, line = coded(0, 1, 1, 100, 16, 16, 3.0)
    check(coded_tiers, line, 1e3 * torch.randn(1, 1, 60, 17, generator=torch.Generator().manual_seed(1)), None)
