"""Which tokens stay, and all of a compressed cache, by the Triton kernels: bit for bit those of plain torch."""

from __future__ import annotations

import copy
import math
from dataclasses import fields
from itertools import pairwise

import pytest
import torch
from device import DEVICE, calls_of_kernels, needs_device

from dofla.attention import LOG_ZERO, CodedTiers, Moments, attend
from dofla.attention.coding.heavy_hitters import WEIGHTS, _select_survivors, _steps
from dofla.attention.constants import FREE, MOST_SCORE, OCTAVE
from dofla.attention.gpu.codes import Codes
from dofla.feature_maps.none import NoFeatures

pytestmark = needs_device

SCALING = 0.3
PER_STEP = SCALING * math.log2(math.e) * OCTAVE


def vectors(seed, batch, heads, groups, length, head_dim=16, value_dim=24):
    generator = torch.Generator().manual_seed(seed)
    sizes = [(heads * groups, head_dim), (heads, head_dim), (heads, value_dim)]
    query, key, value = (torch.randn(batch, n, length, d, generator=generator) for n, d in sizes)
    return query, key + 0.5, value - 0.5


def memory(key, value, tiers, heavy_hitters):
    coded_tiers = CodedTiers(key.shape[1], key.shape[-1], value.shape[-1], tiers, heavy_hitters)
    for coder, x in ((coded_tiers.key, key), (coded_tiers.value, value)):
        coder.calibrate(Moments.of(x.transpose(0, 1).flatten(1, 2)))
    return coded_tiers.requires_grad_(False)


@pytest.mark.interpreter
@pytest.mark.parametrize("length", [1, 30])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    ("dim", "bits", "scale"),  # steps of parts, of whole ones, and beyond those that float32 has
    [(8, 3.0, 0.1), (24, 1.5, 3.0), (64, 3.5, 1e3), (128, 2.0, 1e7)],
)
def test_logarithms_and_choice_are_those_of_plain_torch(dim, bits, scale, groups, length):
    from dofla.attention.gpu.heavy_hitters import logarithms, select_survivors

    places, newest = 21, 6
    query, key, value = vectors(0, 2, 2, groups, places + length, dim)
    coder = memory(key, value, [(places, bits)], 0).key
    query_integers, codes = coder.rotate_query_integer(scale * query[:, :, places:]), coder.encode(key)
    generator = torch.Generator().manual_seed(1)
    score = torch.randint(0, 40, (2, 2, places + length), generator=generator).to(torch.int16)
    score[0, 0, 3], score[1, :, :5], score[:, :, places:] = MOST_SCORE, FREE, 0
    real = torch.rand(2, length, generator=generator) < 0.8
    score[:, :, places:][~real.unsqueeze(1).expand(-1, 2, -1)] = FREE
    steps = _steps(query_integers, coder.numbers(*codes, 0), PER_STEP)

    own, (numbers, unit) = copy.deepcopy(coder).to(DEVICE), (x.to(DEVICE) for x in query_integers)
    keys = Codes.of(own, *(x.to(DEVICE) for x in codes), 0)
    assert torch.equal(logarithms((numbers, unit), keys, PER_STEP).cpu(), steps)
    found = select_survivors(
        (numbers, unit), real.to(DEVICE), keys, score.to(DEVICE), newest, PER_STEP, WEIGHTS.to(DEVICE)
    )
    for mine, plain in zip(found, _select_survivors(steps, real, score, newest), strict=True):
        assert torch.equal(mine.cpu().to(plain.dtype), plain)


def read(coded_tiers, vectors, weight=None, cuts=(), device="cpu"):
    """Outputs of a text cut at ``cuts``, and the state after it, on the CPU."""
    coded_tiers, (query, key, value) = copy.deepcopy(coded_tiers).to(device), (x.to(device) for x in vectors)
    state, out, length = None, [], query.shape[2]
    features = NoFeatures(key.shape[1], key.shape[-1], 0)
    for a, b in pairwise(sorted({0, length, *(cut for cut in cuts if cut < length)})):
        part = None if weight is None else weight[:, a:b].to(device)
        options = {"scaling": SCALING, "weight": part, "window": 3, "sinks": 2, "coded_tiers": coded_tiers}
        piece, state = attend(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], features, state=state, **options)
        out.append(piece)
    return torch.cat(out, 2).cpu(), state.map(lambda x: x.cpu())


def assert_same(found, wanted, vectors):
    """Outputs nearly, and tiers bit for bit."""
    query, key, value = (x.abs().max().item() for x in vectors)
    size = max(key * query * vectors[0].shape[-1] * SCALING, 1.0)  # of scores, sums of d products
    bound = 64 * size * torch.finfo(torch.float32).eps * max(value, 1.0)
    assert (found[0] - wanted[0]).abs().max() < bound
    for mine, plain in zip(found[1].tiers, wanted[1].tiers, strict=True):
        for field in fields(plain):
            assert torch.equal(getattr(mine, field.name), getattr(plain, field.name)), field.name


TIERS = {  # tokens and bits, kept ones, and the kernels of a call
    "one": ([(6, 3.0)], 0, ["attend"]),
    "one that keeps": ([(4, 3.0)], 5, ["select_survivors", "attend"]),
    "two": ([(3, 4.0), (5, 2.5)], 0, ["attend"] * 2),
    "two of which one keeps": ([(3, 4.0), (4, 2.5)], 5, ["attend", "select_survivors", "attend"]),
}


@pytest.mark.parametrize(("tiers", "left"), zip(TIERS, (0, 7, 7, 0), strict=True), ids=list(TIERS))
def test_a_text_in_any_pieces_leaves_the_state_of_plain_torch(tiers, left):
    tiers, heavy_hitters, kernels = TIERS[tiers]
    text = vectors(0, 2, 1, 3, 26)
    weight = torch.ones(2, 26)
    weight[1, :left] = 0
    coded_tiers = memory(*text[1:], tiers, heavy_hitters)
    wanted = read(coded_tiers, text, weight)
    for cuts in ((), (9, 23, 24, 25)):
        with calls_of_kernels() as called:
            found = read(coded_tiers, text, weight, cuts, DEVICE)
        assert called == kernels * (len(cuts) + 1)
        seen = weight[:, None, :, None]
        assert_same((found[0] * seen, found[1]), (wanted[0] * seen, wanted[1]), text)


@pytest.mark.interpreter
def test_token_by_token():
    text = vectors(1, 1, 2, 1, 18, 8, 16)
    coded_tiers = memory(*text[1:], [(2, 4.0), (3, 3.0)], 4)
    with calls_of_kernels() as called:
        found = read(coded_tiers, text, cuts=range(18), device=DEVICE)
    assert len(called) == 3 * 18
    assert_same(found, read(coded_tiers, text), text)


def test_a_text_longer_than_a_piece():
    """Of those that a call is cut into where tokens are kept."""
    text = vectors(2, 1, 1, 2, 300, 8, 8)
    coded_tiers = memory(*text[1:], [(10, 3.0)], 30)
    with calls_of_kernels() as called:
        found = read(coded_tiers, text, device=DEVICE)
    assert called == ["select_survivors", "attend"] * 2
    assert_same(found, read(coded_tiers, text), text)


@pytest.mark.interpreter
def test_bfloat16():
    text = [x.bfloat16() for x in vectors(3, 1, 2, 1, 20)]
    coded_tiers = memory(*(x.float() for x in text[1:]), [(4, 3.0)], 5)
    wanted = read(coded_tiers, text)
    with calls_of_kernels() as called:
        found = read(coded_tiers, text, device=DEVICE)
    assert called == ["select_survivors", "attend"]
    assert found[0].dtype == torch.bfloat16
    off = torch.finfo(torch.bfloat16).eps * wanted[0].abs().max()  # rounded once, perhaps to a neighbor
    assert (found[0].float() - wanted[0].float()).abs().max() <= off
    for mine, plain in zip(found[1].tiers, wanted[1].tiers, strict=True):
        assert torch.equal(mine.key, plain.key)
        assert torch.equal(mine.score, plain.score)


@pytest.mark.interpreter
@pytest.mark.parametrize("of", ["query", "value"])
def test_gradients_are_those_of_plain_torch(of):
    """A call that asks for gradients is done in plain torch."""
    text = vectors(4, 1, 1, 2, 20)
    coded_tiers = memory(*text[1:], [(4, 3.0)], 5)
    asked = text[{"query": 0, "value": 2}[of]].requires_grad_()
    read(coded_tiers, text)[0].square().sum().backward()
    wanted, asked.grad = asked.grad, None
    with calls_of_kernels() as called:
        read(coded_tiers, text, device=DEVICE)[0].square().sum().backward()
    assert not called
    torch.testing.assert_close(asked.grad, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


def test_float64_is_attended_to_in_plain_torch():
    text = [x.double() for x in vectors(5, 1, 1, 1, 20)]
    coded_tiers = memory(*(x.float() for x in text[1:]), [(4, 3.0)], 5)
    with calls_of_kernels() as called:
        found = read(coded_tiers, text, device=DEVICE)
    assert not called
    assert_same(found, read(coded_tiers, text), text)


@pytest.mark.interpreter
def test_padding_alone():
    text = vectors(6, 1, 1, 1, 12)
    coded_tiers = memory(*text[1:], [(3, 3.0)], 4)
    wanted = read(coded_tiers, text, torch.zeros(1, 12))
    with calls_of_kernels():
        found = read(coded_tiers, text, torch.zeros(1, 12), device=DEVICE)
    assert_same(found, wanted, text)
    assert (found[1].tiers[0].score == FREE).all()
    assert (found[1].tiers[0].log_weight == LOG_ZERO).all()
