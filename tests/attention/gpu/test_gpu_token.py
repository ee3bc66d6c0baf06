"""A decoded token of a compressed cache by the Triton kernels alone: states bit for bit those of the CPU."""

import copy

import pytest
import torch
from device import INTERPRETED, calls_of_kernels, needs_device
from gpu_caches import CACHES, SCALING, cache_of, check, heads_of, moved, read, text_of
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dofla.attention import Call, HeadSizes, Moments
from dofla.attention.gpu.backend import Triton
from dofla.attention.gpu.operators import decoders_of
from dofla.attention.naive_cache import NaiveCache

pytestmark = needs_device
CLOSE = 256 * torch.finfo(torch.float32).eps


def check_tokens(heads, text, before, weight=None):
    """Tokens one by one, each by the kernels of a decoded token."""
    cuts = list(range(before, text[0].shape[2] + 1))
    assert check(heads, text, cuts, weight, before) == ["decoders_of"] * (len(cuts) - 1)


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        *((name, 2) for name in CACHES),
        pytest.param("alike", 1, marks=pytest.mark.interpreter),
        pytest.param("tiers of other sizes", 1, marks=pytest.mark.interpreter),
    ],
)
def test_states_and_outputs_are_those_of_the_cpu(name, groups):
    heads, before = cache_of(name)
    check_tokens(heads, text_of(heads, 2, before + 5, groups), before)


@pytest.mark.interpreter
def test_a_text_from_its_first_token_is_that_of_the_naive_cache():
    size = HeadSizes(2, 1, 2, 2)
    heads = heads_of(8, 8, [size] * 2)
    text = text_of(heads, 2, 9, 2)
    naive = NaiveCache(size, heads.tiers[0], SCALING)
    query, key, value = (x.flatten(0, 1).unflatten(0, (4, -1)) for x in text)  # rows: the KV heads of all sequences
    wanted = [naive.step(query[:, :, n], key[:, 0, n], value[:, 0, n]) for n in range(9)]
    with calls_of_kernels():
        found, state = read(moved(heads), moved(text), range(10))
    found = found.cpu().flatten(0, 1).unflatten(0, (4, -1))
    assert (found - torch.stack(wanted, 2)).abs().max() < CLOSE * value.abs().max()
    (held,) = heads.layout.open(state.map(torch.Tensor.cpu))
    assert torch.equal(held.tier.score.flatten(0, 1).double(), naive.scores.double())
    assert torch.equal(held.tier.key.flatten(0, 1), naive.codes[0][0])
    assert torch.equal(held.tier.value.flatten(0, 1), naive.codes[1][0])


@pytest.mark.parametrize("name", [pytest.param("no sinks", marks=pytest.mark.interpreter), "more than a tile"])
def test_as_many_rows_parts_and_moves_as_large_models_take(name, monkeypatch):
    from dofla.attention.gpu import token

    monkeypatch.setattr(token, "ROWS", 16)
    monkeypatch.setattr(token, "TILE", 16)
    monkeypatch.setattr(token, "SCORES", 4)
    monkeypatch.setattr(token, "MOVED", 512)  # bytes: some four tokens at once
    heads, before = cache_of(name)
    check_tokens(heads, text_of(heads, 1, before + 3, 18), before)


@pytest.mark.interpreter
def test_padding_before_and_between():
    heads, before = cache_of("alike")
    weight = torch.ones(3, before + 5)
    weight[1, :7], weight[0, before + 2], weight[2] = 0, 0, 0
    check_tokens(heads, text_of(heads, 3, before + 5, 2), before, weight)


def test_bfloat16():
    heads, before = cache_of("others in each head")
    check_tokens(heads, text_of(heads, 1, before + 5, 2, torch.bfloat16), before)


@pytest.mark.interpreter
def test_states_are_updated_in_their_pages():
    heads, before = cache_of("tiers of other sizes")
    text, pages, size = text_of(heads, 2, before + 2, 2), torch.tensor([3, 1]), heads.layout.bytes
    state = read(heads, text, [0, before])[1]
    wanted, after = read(heads, text, [before, before + 1, before + 2], state)
    whole = torch.randint(0, 256, (5, size + 16), dtype=torch.uint8)
    whole[pages, :size] = state.rows
    own, found, text = moved(heads), moved(whole), moved(text)
    for n in range(2):
        call = Call(*(x[:, :, before + n : before + n + 1] for x in text), SCALING)
        out = Triton().read_pages(own, call, found[:, :size], moved(pages), [0, 1, 2])
        off = out.cpu() - wanted[:, :, n : n + 1]
        assert off.abs().max() < CLOSE * text[2].abs().max()
    whole[pages, :size] = after.rows
    assert torch.equal(found.cpu(), whole)
    assert Triton().read_pages(own, call, found[:, :size], moved(pages[:1]), [0, 2]) is None  # not for longer parts


def replaced(coder):
    """Constants of other vectors, in another place."""
    other, generator = copy.deepcopy(coder).cpu(), torch.Generator().manual_seed(2)
    other.calibrate(Moments.of(2 * torch.randn(coder.heads, 300, coder.dim, generator=generator)))
    coder.constants = moved(other.constants)


def test_coders_that_were_calibrated_again_are_those_of_the_next_token():
    heads, before = cache_of("tiers of other sizes")
    text = moved(text_of(heads, 1, before + 1, 1))
    heads = moved(heads)
    state = read(heads, text, [0, before])[1]
    with calls_of_kernels():
        found = [read(heads, text, [before, before + 1], state)[0]]
        (decoder,) = decoders_of(heads, heads.layout)
        places = [coder.constants.data_ptr() for coder in decoder.coders()]
        for change in (lambda coder: coder.mean.add_(1), replaced):
            for tier in heads.tiers:
                change(tier.value)  # written, and replaced
            found.append(read(heads, text, [before, before + 1], state)[0])
            assert torch.equal(found[-1], read(copy.deepcopy(heads), text, [before, before + 1], state)[0])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    assert places == [coder.constants.data_ptr() for coder in decoder.coders()]  # where CUDA graphs read them


class _Operations(TorchDispatchMode):
    """Names of those of torch that a GPU would be given, or wait for; views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation._schema.name.removeprefix("aten::")
        if not operation.is_view and "empty" not in name:
            self.names.append(name)
        return operation(*args, **(kwargs or {}))


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED, reason="counts launches, which the interpreter tells of")
@pytest.mark.parametrize(("name", "paged"), [("tiers of other sizes", False), ("alike", True)])
def test_a_token_is_three_launches_and_waits_for_nothing(name, paged, monkeypatch):
    from triton.runtime.interpreter import GridExecutor

    launched, run = [], GridExecutor.__call__

    def launch(self, *args, **options):
        launched.append(self.fn.__name__)
        with _disable_current_modes():  # what the interpreter does with tensors is no operation
            run(self, *args, **options)

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    heads, before = cache_of(name)
    text = text_of(heads, 2, before + 2, 2)
    state, pages = read(heads, text, [0, before])[1], torch.tensor([1, 0])
    for n in range(before, before + 2):  # tables are on the device at the second token
        launched.clear()
        call = Call(*(x[:, :, n : n + 1] for x in text), SCALING, in_place=True)
        with _Operations() as counted:
            if paged:
                Triton().read_pages(heads, call, state.rows, pages, [0, 1, 2])
            else:
                Triton().read_compressed(heads, call, state)
    assert launched == ["encode_and_rotate", "attend", "update"]
    assert not counted.names


@pytest.mark.interpreter
def test_heads_that_grow_need_no_other_kernels_and_no_other_constants():
    from dofla.attention.gpu.codes import Coding

    heads, _ = cache_of("one that grows")
    found = set()
    for tokens in (10, 100, 3000):
        for decoder in decoders_of(heads, heads.layouts.with_room(tokens)):
            of_keys, of_values = decoder.coders()
            shape = decoder._shape(2, Coding.of(of_keys), Coding.of(of_values))
            found.add((shape, id(of_keys), id(of_values)))
    assert len(found) == len(decoders_of(heads, heads.layout))
