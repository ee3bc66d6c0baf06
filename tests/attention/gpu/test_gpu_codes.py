"""Codes and rotated queries by the Triton kernels: bit for bit those of plain torch."""

from __future__ import annotations

import copy

import pytest
import torch
from arithmetic import sum_error
from device import DEVICE, needs_device

from dofla.attention import Coder, Moments
from dofla.attention.coding.operations import PLAIN

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
    from dofla.attention.gpu.encode import entered

    coder, fall = coder_of(dim, [bits])
    x = vectors(1 if length > 1 else 2, 2, length, dim) * fall + 0.3
    x[0, 0, 0] = 0
    for precision in (torch.float32, torch.bfloat16):
        own = x.to(precision)
        found = entered(copy.deepcopy(coder).to(DEVICE), own.to(DEVICE))
        for mine, plain in zip(found, coder.encode(own), strict=True):
            assert torch.equal(mine.cpu(), plain)
        if dim > 24:
            break  # numbers are numbers


@pytest.mark.interpreter
def test_codes_in_several_launches(monkeypatch):
    from dofla.attention.gpu import encode

    coder, _ = coder_of(8, [3.0])
    x, own, launches = vectors(1, 2, 50, 8), copy.deepcopy(coder).to(DEVICE), []
    monkeypatch.setattr(encode, "SCRATCH", 20 * 2 * 8 * 37)  # what twenty tokens of two heads take
    monkeypatch.setattr(encode, "block_count", lambda *sizes: launches.append(sizes) or -(-sizes[0] // sizes[1]))
    for mine, plain in zip(encode.entered(own, x.to(DEVICE)), coder.encode(x), strict=True):
        assert torch.equal(mine.cpu(), plain)
    assert launches == [(20, 16)] * 3


@pytest.mark.interpreter
@pytest.mark.parametrize(("dim", "bits"), [(16, [4.0, 2.5]), (64, [4.25, 2.0])])
def test_codes_of_codes(dim, bits):
    from dofla.attention.gpu.encode import age

    coder, fall = coder_of(dim, bits)
    codes = coder.encode(vectors(1, 2, 3, dim) * fall)
    numbers = [x.to(DEVICE) for x in coder.numbers(*codes, 0)]
    for mine, plain in zip(
        age(copy.deepcopy(coder).to(DEVICE), numbers, 1), PLAIN.requantize([coder], [codes], 0)[0], strict=True
    ):
        assert torch.equal(mine.cpu(), plain)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dim", [pytest.param(8, marks=pytest.mark.interpreter), 40, 128])
def test_queries(dim, groups):
    from dofla.attention.gpu.rotate_query import rotate_queries

    coder, _ = coder_of(dim, [3.0])
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
