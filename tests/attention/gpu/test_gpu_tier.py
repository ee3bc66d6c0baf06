"""Attention to a tier from its codes by the Triton kernel, against plain torch in float64 from the same codes."""

import copy

import pytest
import torch
from arithmetic import sum_error
from device import DEVICE, needs_device

from dofla.attention import LOG_ZERO, CodedTokens, Moments, Tier
from dofla.attention.coding.operations import CodeOperations
from dofla.attention.constants import FREE, NEVER

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


def tier_of(batch, heads, count, head_dim, value_dim, bits):
    """A tier, and ``count`` tokens in it; row 1 of a batch begins with padding."""
    generator = torch.Generator().manual_seed(0)
    tier, codes = Tier(heads, head_dim, value_dim, 7, 0, bits), []
    for coder in (tier.key, tier.value):
        fall = torch.exp(-3 * torch.arange(coder.dim) / coder.dim)
        x = torch.randn(batch, heads, count, coder.dim, generator=generator) * fall + 0.3
        coder.calibrate(Moments.of(x.transpose(0, 1).flatten(1, 2)))
        codes += coder.encode(x)
    score = torch.zeros(batch, heads, count, dtype=torch.int16)
    score[1:, :, : count // 2] = FREE
    return tier, CodedTokens(*codes, score)


def by_age(line, length):
    """Each query evicts the token that has been there longest."""
    order = torch.arange(len(line))
    return torch.where(order < length, order, NEVER).expand(line.score.shape)


def check(tier, line, rotated, evicted_at):
    """In float32 by the kernel, as in float64 by plain torch; gives which queries see nothing."""
    from dofla.attention.gpu.tier import attend

    found, own = copy.deepcopy(tier).to(DEVICE), line.map(lambda x: x.to(DEVICE))
    going = evicted_at.to(DEVICE, torch.int32).contiguous()
    attended = attend(found.key, found.value, rotated.to(DEVICE), own, going, SCALING)
    out, normalizer = (x.cpu().double() for x in attended)
    wanted, wanted_normalizer = CodeOperations().attend(
        tier.key, tier.value, rotated.double(), line, evicted_at, SCALING
    )
    nobody = wanted_normalizer < LOG_ZERO / 2
    # Roundings of n numbers are of either sign: a sum is off by a few times √n of them (Higham and Mary 2019). Three
    # products of TF32, for one of float32, leave out up to 2⁻²⁰ of it, perhaps always the same way.
    keys = tier.key.decode(line.key, line.key_scale)
    size = SCALING * rotated.norm(dim=-1).max().item() * (keys.norm(dim=-1).max().item() + 1)
    of_scores = sum_error(4 * (keys.shape[-1] + 3) ** 0.5 + 8, size)
    of_weights = sum_error(4 * (len(line) + 3) ** 0.5 + 8)
    most = tier.value.decode(line.value, line.value_scale).abs().max().item()
    assert (out - wanted).abs().max() < 2 * (of_scores + of_weights) * most
    assert ((normalizer - wanted_normalizer).abs() * ~nobody).max() < of_scores + of_weights + sum_error(2, size)
    assert (normalizer[nobody] == LOG_ZERO).all()
    assert (out[nobody] == 0).all()
    return nobody


@pytest.mark.parametrize("length", [1, 37])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("in_turn", [True, False], ids=["as they came", "when they must"])
def test_a_line_of_tokens_that_go(in_turn, sizes, groups, length):
    generator = torch.Generator().manual_seed(1)
    tier, line = tier_of(2, 2, (7 if in_turn else 40) + length, *sizes)
    rotated = torch.randn(2, 2 * groups, length, sizes[0] + 1, generator=generator)
    if in_turn:
        nobody = check(tier, line, rotated, by_age(line, length))
        assert nobody.any() == (length > 1)  # the first queries of the row that begins with padding
        return
    evicted_at = torch.randint(0, 2 * length, line.score.shape, generator=generator)
    evicted_at = torch.where(evicted_at < length, evicted_at, NEVER)
    evicted_at[0, 1] = 0
    assert check(tier, line, rotated, evicted_at)[0, groups:].all()


@pytest.mark.interpreter
def test_queries_of_any_strides():
    """As parts of a call are."""
    tier, line = tier_of(1, 2, 20, 16, 24, 3.0)
    rotated = torch.randn(1, 2, 29, 17, generator=torch.Generator().manual_seed(1))
    check(tier, line, rotated[:, :, 4:17], by_age(line, 13))
    check(tier, line, rotated[:, :, 4:17].mT.contiguous().mT, by_age(line, 13))


@pytest.mark.interpreter
def test_scores_of_thousands():
    """Weights that are 0 beside others, before and after those."""
    tier, line = tier_of(1, 1, 100, 16, 16, 3.0)
    rotated = 1e3 * torch.randn(1, 1, 60, 17, generator=torch.Generator().manual_seed(1))
    check(tier, line, rotated, by_age(line, 60))
