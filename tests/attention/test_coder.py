"""Codes: exact arithmetic, errors as the theory of quantizers has them, bytes as counted."""

import math
from itertools import pairwise

import pytest
import torch
from forms import KernelCalls, needs_kernels, threads
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dofla.attention import Coder, Moments, tier_bytes
from dofla.attention.coding.blocks import decode, encode, from_bytes, to_bytes, whole
from dofla.attention.coding.coder import spread
from dofla.attention.coding.levels import DISTORTION, levels, scale_code, scale_of
from dofla.attention.coding.operations import CodeOperations
from dofla.attention.coding.trellis import search, windows
from dofla.attention.compiled.backend import Compiled
from dofla.attention.constants import FINE, MOST_BITS, UNIT, WINDOW


def vectors(heads=2, length=256, dim=32, seed=0, batch=1, fall=8.0):
    """Correlated, off center, of falling variance."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(heads, dim, dim, generator=generator) * torch.exp(-torch.arange(dim) / fall)
    middle = 3 * torch.randn(heads, 1, dim, generator=generator)
    return torch.randn(batch, heads, length, dim, generator=generator) @ mix.mT + middle


def moments(x):
    return Moments.of(x.transpose(0, 1).flatten(1, 2))


def calibrated(x, bits=3.0, weighing=None):
    coder = Coder(x.shape[1], x.shape[-1], bits)
    coder.calibrate(moments(x), weighing)
    return coder


@settings(max_examples=40)
@given(st.sampled_from([(1, 10), (2, 6), (3, 4), (4, 3), (5, 2)]), st.integers(0, 2**31))
def test_no_ring_that_closes_in_the_same_state_is_better(kind, seed):
    bits, length = kind
    x = (FINE * UNIT * torch.randn(1, length, generator=torch.Generator().manual_seed(seed))).round()
    rings = windows(torch.cartesian_prod(*[torch.arange(2**bits)] * length).to(torch.uint8), bits)
    found = windows(search(x, levels(bits), bits), bits)
    states = 2 ** (WINDOW - bits)
    rings = rings[rings[:, -1] % states == found[0, -1] % states]
    error, errors = ((levels(bits)[w] - x / FINE).square().sum(1) for w in (found, rings))
    assert error.item() == errors.min()  # squares of quarters, which float32 holds


@pytest.mark.parametrize("bits", range(1, MOST_BITS + 1))
def test_codes_lose_what_is_said(bits):
    x = torch.randn(4000, 16, generator=torch.Generator().manual_seed(1))
    x = UNIT * x / x.square().mean(1, keepdim=True).sqrt()
    found = levels(bits)[windows(search((FINE * x).round(), levels(bits), bits), bits)]
    cosine = (x * found).sum(1) / (x.square().sum(1) * found.square().sum(1)).sqrt()
    lost = 2 - 2 * cosine
    # Five standard errors of the mean over these blocks and over those that the figure is from, five times as many.
    assert (lost.mean() - DISTORTION[bits]).abs() < 5 * lost.std() * (1 / 4000 + 1 / 20000) ** 0.5
    # Max (1960), table 1: mean squared errors of 2, 4, 8, 16 and 32 levels, of least squares as here.
    assert DISTORTION[bits] < [0.3634, 0.1175, 0.03454, 0.009497, 0.002499][bits - 1]


def test_levels_are_bytes_and_turn_round():
    for bits in range(1, MOST_BITS + 1):
        assert (levels(bits) == -levels(bits).flip(0)).all()
        assert levels(bits).abs().max() <= 127


@given(st.floats(2.0**-8, 2.0**7.9))
def test_scales_are_off_by_half_a_step_at_most(size):
    scale = size / UNIT
    found = scale_of(scale_code(torch.tensor([scale**2]))).item()
    assert abs(math.log2(found / scale)) <= 1 / 32 + 2**-20  # a step is a sixteenth of a factor of two


@settings(max_examples=50)
@given(st.integers(1, MOST_BITS), st.sampled_from([8, 16]), st.integers(0, 2**31))
def test_bytes_hold_the_codes(bits, size, seed):
    codes = torch.randint(2**bits, (3, 5, size), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = to_bytes(codes, bits)
    assert packed.shape[-1] == bits * size // 8
    assert torch.equal(from_bytes(packed, bits), codes)


@settings(max_examples=50)
@given(st.integers(0, 2**31), st.floats(-30, 30))
def test_blocks_are_whole_numbers_that_float32_adds_exactly(seed, exponent):
    x = torch.randn(20, 16, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    numbers, unit = whole(x)
    assert torch.equal(numbers, numbers.round())
    assert numbers.abs().max() <= 256
    # Half a unit is lost at most, and the largest number has eight bits.
    assert ((numbers * unit - x).abs() <= unit / 2).all()
    assert (numbers.abs().amax(-1) >= 127).all()


@pytest.mark.parametrize("bits", range(1, MOST_BITS + 1))
def test_normal_numbers_are_kept_as_well(bits):
    x = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0))
    numbers, unit = decode(*encode(*whole(x), bits), bits)
    found = (numbers * unit - x).square().mean() / x.square().mean()
    # A scale in steps of 4.4 % loses at most (2.2 %)²; half a unit of 128 or more for rounding; 64,000 draws.
    assert 0.95 * DISTORTION[bits] < found < 1.05 * DISTORTION[bits] + 0.022**2 + 1 / (12 * 40**2)


@settings(max_examples=50)
@given(st.integers(1, MOST_BITS), st.integers(0, 2**31), st.floats(-7, 7))
def test_blocks_keep_their_length(bits, seed, exponent):
    x = torch.randn(20, 16, generator=torch.Generator().manual_seed(seed))
    x = x / x.square().mean(-1, keepdim=True).sqrt() * 2.0**exponent
    numbers, unit = decode(*encode(*whole(x), bits), bits)
    # Half a step of the scale, and rounding to integers: half of one for each, where the largest is 128 at least.
    off = (numbers * unit).square().mean(-1).sqrt() / 2.0**exponent
    assert (off.log2().abs() < 1 / 32 + math.log2(1 + 16**0.5 * 0.5 / 128) + 2**-20).all()


def test_calibrated_blocks_have_size_1():
    x = 1e-3 * vectors(dim=64, length=2048, fall=1e9)
    coder = calibrated(x)
    rotated = x @ (coder.rotation * coder.fineness.unsqueeze(-1)).mT - coder.middle.unsqueeze(1)
    rotated = rotated.unflatten(-1, (-1, 16))
    # The rows of the rotation are rounded to 16 bits, or less where their sums must stay below 2²⁴ / 127.
    torch.testing.assert_close(rotated.square().mean((0, 2, 4)), torch.ones(2, 4), rtol=2e-3, atol=0)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**31),
    dim=st.sampled_from([16, 24, 32, 64, 80, 128, 256]),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
    cuts=st.lists(st.integers(1, 39), max_size=4),
)
def test_a_code_depends_on_its_token_alone(seed, dim, size, cuts):
    x = size * vectors(heads=2, length=40, dim=dim, seed=seed, batch=2)
    coder = calibrated(x)
    together = coder.encode(x)
    bounds = sorted({0, 40, *cuts})
    parts = [coder.encode(x[:, :, a:b]) for a, b in pairwise(bounds)]
    for whole_call, pieces in zip(together, zip(*parts, strict=True), strict=True):
        assert torch.equal(whole_call, torch.cat(pieces, 2))


def test_products_with_the_rotation_are_exact():
    x = vectors(dim=128, length=16)
    coder = calibrated(x)
    integers = torch.randint(-127, 128, (1, 2, 16, 128), generator=torch.Generator().manual_seed(1))
    assert torch.equal(
        (integers.float() @ coder.rotation.float().mT).double(), integers.double() @ coder.rotation.double().mT
    )
    assert (127 * coder.rotation.double().abs().sum(-1) < 2**24).all()


def relative_error(coder, x, of=None):
    found = coder.unrotate(coder.decode(*coder.encode(x))) - x
    centered = x - x.mean((0, 2), keepdim=True)
    of = torch.eye(x.shape[-1]) if of is None else of
    return (
        torch.einsum("bhli,hij,bhlj->", found, of.expand(x.shape[1], -1, -1), found)
        / torch.einsum("bhli,hij,bhlj->", centered, of.expand(x.shape[1], -1, -1), centered)
    ).item()


@pytest.mark.parametrize("count", [1, 2])
def test_what_rotates_back_undoes_the_rotation_on_any_number_of_threads(count):
    with threads(count):
        coder = calibrated(vectors(heads=4, dim=256))
    rotation, back = coder.rotation.double() * coder.fineness.double().unsqueeze(-1), coder.back.double()
    # ``back`` is rounded to float32, and nothing else is near that.
    bound = torch.finfo(torch.float32).eps * rotation.abs() @ back.abs()
    assert ((rotation @ back - torch.eye(256, dtype=torch.float64)).abs() <= bound).all()


def test_directions_that_matter_beat_a_rotation():
    x = vectors(dim=64, length=2048)
    plain = Coder(2, 64, 3.0)
    mean_only = Moments(
        1, x.mean((0, 2)).double(), x.mean((0, 2)).double().unsqueeze(-1) * x.mean((0, 2)).double().unsqueeze(-2)
    )
    plain.calibrate(Moments(1, mean_only.total, mean_only.square + torch.eye(64).double()))
    assert relative_error(calibrated(x), x) < 0.2 * relative_error(plain, x)


def test_errors_are_small_where_they_count():
    x = vectors(dim=32, length=2048, fall=1e9)  # all directions alike
    weighing = torch.diag(torch.tensor([100.0] * 8 + [1.0] * 24)).double().expand(2, -1, -1)
    weighed = relative_error(calibrated(x, 2.0, weighing), x, weighing.float())
    assert weighed < 0.7 * relative_error(calibrated(x, 2.0), x, weighing.float())


@given(st.lists(st.floats(0, 100), min_size=1, max_size=16), st.sampled_from([1.0, 1.5, 2.5, 3.25, 5.0]))
@example([0.0, 5e-324], 1.5)
def test_bits_go_where_variance_is(variance, bits):
    found = spread(variance, bits)
    assert sum(found) == len(found) + round((bits - 1) * len(found))
    assert all(1 <= n <= MOST_BITS for n in found)
    order = sorted(range(len(found)), key=lambda n: -variance[n])
    assert all(found[a] >= found[b] for a, b in pairwise(order))


@needs_kernels
@pytest.mark.parametrize(("dim", "bits"), [(8, 2.5), (16, 1.0), (24, 3.0), (64, 2.5), (80, 4.0), (128, 5.0)])
@pytest.mark.parametrize("length", [0, 1, 200])
def test_kernels_decode_bit_for_bit(dim, bits, length):
    x = vectors(dim=dim, batch=2)
    coder, plain = calibrated(x, bits), CodeOperations()
    codes, scales = coder.encode(x[:, :, :length])
    with KernelCalls() as calls:
        found = Compiled().decode(coder, (codes, scales))
    assert calls.names == {"decode"}
    assert torch.equal(found, plain.decode(coder, (codes, scales)))
    if length:  # rows that stand apart, and backward
        turned = tuple(part.flip(2)[:, :, ::2] for part in (codes, scales))
        assert torch.equal(Compiled().decode(coder, turned), plain.decode(coder, turned))


@pytest.mark.parametrize(("dim", "bits"), [(8, 2.5), (16, 2.5), (24, 3.0), (64, 2.5), (64, 4.0), (80, 3.2), (256, 1.5)])
def test_bytes_are_those_that_are_counted(dim, bits):
    coder = Coder(1, dim, bits)
    coder.reset()
    codes, scales = coder.encode(vectors(heads=1, length=3, dim=dim))
    assert codes.shape[-1] + scales.shape[-1] == coder.bytes_per_token
    assert tier_bytes(dim, dim, bits) == 2 * coder.bytes_per_token + 2  # and a score


def test_moments_add_up():
    x = vectors(length=100)[0]
    both = Moments.of(x[:, :30]) + Moments.of(x[:, 30:])
    whole_of = Moments.of(x)
    eps = torch.finfo(torch.float64).eps
    assert both.count == 100
    torch.testing.assert_close(both.mean, whole_of.mean, rtol=100 * eps, atol=100 * eps * x.abs().max().item())
    torch.testing.assert_close(
        both[[1]].second[0], whole_of.second[1], rtol=0, atol=200 * eps * x.double().square().max().item()
    )
