"""Which tokens stay, and texts read some tokens at a time, by the Triton kernels: states bit for bit those of the
CPU."""

import copy
import math

import pytest
import torch
from device import DEVICE, calls_of_kernels, needs_device
from gpu_caches import SCALING, check, heads_of, moved, read, text_of

from dofla.attention import CodedTokens
from dofla.attention.coding import heavy_hitters
from dofla.attention.constants import FREE, MOST_SCORE, OCTAVE

pytestmark = needs_device

PER_STEP = SCALING * math.log2(math.e) * OCTAVE
PART = ["select_survivors", "attend"]
"""The kernels of a part of a text."""


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
    heads = heads_of(dim, 24, [(3, 2, places, 0)] * 2, bits)
    query, key, _ = text_of(heads, 2, places + length, groups)
    coder = heads.tiers[0].key
    query_integers, codes = coder.rotate_query_integer(scale * query[:, :, places:]), coder.encode(key)
    generator = torch.Generator().manual_seed(1)
    score = torch.randint(0, 40, (2, 2, places + length), generator=generator).to(torch.int16)
    score[0, 0, 3], score[1, 0, :3], score[:, :, places:] = MOST_SCORE, FREE, 0
    score[1, 1, : places + length // 4] = FREE  # padding comes before the first token
    real = torch.rand(2, length, generator=generator) < 0.8
    steps = heavy_hitters._steps(query_integers, coder.numbers(*codes), PER_STEP)

    line = CodedTokens(*codes, *codes, score)
    own, integers = copy.deepcopy(coder).to(DEVICE), tuple(moved(list(query_integers)))
    there = line.map(lambda x: x.to(DEVICE))
    assert torch.equal(logarithms(own, integers, there, PER_STEP).cpu(), steps)
    found, evicted_at = select_survivors(own, integers, moved(real), there, newest, SCALING)
    wanted, when = heavy_hitters.select_survivors(coder, query_integers, real, line, newest, SCALING)
    assert torch.equal(evicted_at.cpu().long(), when)
    for mine, plain in zip(vars(found).values(), vars(wanted).values(), strict=True):
        assert torch.equal(mine.cpu(), plain)


@pytest.mark.parametrize("left", [0, 7])
def test_a_text_in_any_parts_leaves_the_state_of_the_cpu(left):
    heads = heads_of(16, 24, [(3, 2, 4, 5)])
    text, weight = text_of(heads, 2, 26, 3), torch.ones(2, 26)
    weight[1, :left] = 0
    for cuts in ((0, 26), (0, 9, 23, 26)):
        assert check(heads, text, cuts, weight) == PART * (len(cuts) - 1)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_other_sizes_go_on_from_a_state(dtype):
    heads = heads_of(8, 16, [(3, 2, 4, 5), (2, 1, 3, 4)])
    assert check(heads, text_of(heads, 1, 20, 1, dtype), [12, 20], before=12) == PART * 2


def test_a_text_longer_than_a_piece():
    """Of those that a call is cut into where tokens are kept."""
    heads = heads_of(8, 8, [(3, 2, 10, 30)])
    assert check(heads, text_of(heads, 1, 300, 2), [0, 300]) == PART * 2


def test_float64_is_attended_to_in_plain_torch():
    heads = heads_of(16, 24, [(3, 2, 4, 5)])
    text = [x.double() for x in text_of(heads, 1, 20, 1)]
    with calls_of_kernels() as called:
        found, state = read(moved(heads), moved(text), [0, 20])
    assert not called
    wanted, after = read(heads, text, [0, 20])
    assert torch.equal(state.rows.cpu(), after.rows)
    torch.testing.assert_close(found.cpu(), wanted)


@pytest.mark.interpreter
def test_padding_alone():
    heads = heads_of(16, 24, [(3, 2, 3, 4)])
    text, weight = text_of(heads, 1, 12, 1), torch.zeros(1, 12)
    check(heads, text, [0, 12], weight)
    with calls_of_kernels():
        _, state = read(moved(heads), moved(text), [0, 12], weight=moved(weight))
    assert (heads.layout.open(state)[0].tier.score == FREE).all()
