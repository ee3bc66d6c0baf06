"""Codes and rotated queries by the Triton kernels: bit for bit those of plain torch; and vectors of codes."""

import copy

import pytest
import torch
from arithmetic import sum_error
from device import DEVICE, needs_device

from dofla.attention import Coder, Moments

pytestmark = needs_device


def coder_of(dim, bits, heads=2):
    generator = torch.Generator().manual_seed(dim)
    fall = torch.exp(-3 * torch.arange(dim) / dim)
    coder = Coder(heads, dim, bits)
    coder.calibrate(Moments.of(torch.randn(heads, 300, dim, generator=generator) * fall + 0.3))
    return coder, fall


def vectors(batch, heads, length, dim, seed=0):
    """Some of them all zeros, too small for float32's ordinary numbers, and large."""
    x = torch.randn(batch, heads, length, dim, generator=torch.Generator().manual_seed(seed))
    x[0, 0, 0], x[-1, -1, -1] = 0, 1e-41
    x[0, -1, -1] *= 1e9
    return x


@pytest.mark.parametrize("length", [1, 17], ids=["a token", "more than a program takes"])
@pytest.mark.parametrize(
    ("dim", "bits"),
    [
        pytest.param(8, 1.0, marks=pytest.mark.interpreter),
        (24, 2.5),
        pytest.param(40, 3.5, marks=pytest.mark.interpreter),
        (64, 3.0),
        (32, 5.0),
        (128, 4.25),
    ],
)
def test_codes(dim, bits, length):
    from dofla.attention.gpu.encode import encode

    coder, fall = coder_of(dim, bits)
    x = vectors(1 if length > 1 else 2, 2, length, dim) * fall + 0.3
    x[0, 0, 0] = 0
    for precision in (torch.float32, torch.bfloat16)[: 2 if dim <= 24 else 1]:  # numbers are numbers
        own = x.to(precision)
        found = encode(copy.deepcopy(coder).to(DEVICE), own.to(DEVICE))
        for mine, plain in zip(found, coder.encode(own), strict=True):
            assert torch.equal(mine.cpu(), plain)


@pytest.mark.interpreter
def test_codes_in_several_launches(monkeypatch):
    from dofla.attention.gpu import encode

    coder, _ = coder_of(8, 3.0)
    x, own, launches = vectors(1, 2, 50, 8), copy.deepcopy(coder).to(DEVICE), []
    monkeypatch.setattr(encode, "SCRATCH", 20 * 2 * 8 * 37)  # what twenty tokens of two heads take
    monkeypatch.setattr(encode, "block_count", lambda *sizes: launches.append(sizes) or -(-sizes[0] // sizes[1]))
    for mine, plain in zip(encode.encode(own, x.to(DEVICE)), coder.encode(x), strict=True):
        assert torch.equal(mine.cpu(), plain)
    assert launches == [(20, 16)] * 3


@pytest.mark.interpreter
def test_codes_of_the_last_vectors_by_several_coders():
    from dofla.attention.gpu.encode import encode_last

    coders = [coder_of(dim, 2.5, heads)[0] for dim, heads in ((24, 1), (40, 1), (24, 2))]
    inputs = [vectors(2, coder.heads, 20, coder.dim, seed) for seed, coder in enumerate(coders)]
    counts, mine = [20, 3, 1], [copy.deepcopy(coder).to(DEVICE) for coder in coders]
    for _ in range(2):
        found = encode_last(mine, [x.to(DEVICE) for x in inputs], counts)
        for coder, codes, x, count in zip(coders, found, inputs, counts, strict=True):
            assert all(torch.equal(a.cpu(), b) for a, b in zip(codes, coder.encode(x[:, :, -count:]), strict=True))
        for own, coder in zip(mine, coders, strict=True):  # coders that are calibrated anew
            coder.reset()
            own.reset()


@pytest.mark.interpreter
@pytest.mark.parametrize(("dim", "bits"), [(64, 3.0), (40, 2.0), (128, 3.5)])
def test_vectors_of_codes(dim, bits):
    from dofla.attention.gpu.tier import unrotated

    coder, fall = coder_of(dim, bits)
    codes = coder.encode(torch.randn(2, 2, 45, dim, generator=torch.Generator().manual_seed(0)) * fall + 0.5)
    numbers = coder.decode(*codes)
    wanted = coder.unrotate(numbers.double())
    coder.to(DEVICE)
    found = unrotated(coder, tuple(part.to(DEVICE) for part in codes)).cpu()
    # The sum of the absolute products, of which a vector adds up as many as it has numbers.
    size = (
        coder.back.cpu().abs().max() * coder.decode(*(x.to(DEVICE) for x in codes)).cpu().abs().sum(-1).max()
    ).item()
    assert (found - wanted).abs().max() <= sum_error(4 * dim**0.5 + 8, size + 1)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dim", [pytest.param(8, marks=pytest.mark.interpreter), 40, 128])
def test_queries(dim, groups):
    from dofla.attention.gpu.rotate_query import rotate_queries

    coder, _ = coder_of(dim, 3.0)
    query = 3 * vectors(2, 2 * groups, 3, dim)
    own = query.to(DEVICE).mT.contiguous().mT if groups == 1 else query.to(DEVICE)  # of any strides
    rotated, query_integers = rotate_queries(copy.deepcopy(coder).to(DEVICE), own, groups)
    for mine, plain in zip(query_integers, coder.rotate_query_integer(query), strict=True):
        assert torch.equal(mine.cpu(), plain)
    wanted, beside = coder.rotate_query(query.double())
    longest = max(coder.back.norm(dim=1).max().item(), coder.mean.norm(dim=1).max().item())
    size = longest * query.double().norm(dim=-1, keepdim=True)
    off = (rotated.cpu().double() - torch.cat([wanted, beside.unsqueeze(-1)], -1)).abs()
    assert (off <= sum_error(4 * (dim + 1) ** 0.5 + 8) * size + torch.finfo(torch.float32).tiny).all()


@pytest.mark.interpreter
@pytest.mark.parametrize("dim", [8, 40, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_in_int8(dim, dtype):
    from dofla.attention import eight_bits
    from dofla.attention.gpu.encode import pack

    x = torch.randn(2, 3, 50, dim, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-25, 25)[:, None]
    x[0, 0, 0], x = 0.0, x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(pack(x.to(DEVICE)), eight_bits.pack(x), strict=True))
