"""A decoded token of a compressed cache by the Triton kernels alone: states bit for bit those of plain torch."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from device import DEVICE, INTERPRETED, calls_of_kernels, needs_device
from dofla.attention.carried import State
from dofla.feature_maps.layer import LinearAttention
from dofla.feature_maps.pages import read_pages
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dofla.attention import LOG_ZERO, Moments
from dofla.attention.gpu.operators import _DECODERS, decode, decoders_of

pytestmark = needs_device

SCALING = 0.3
LAYERS = {  # heads' sizes, window, sinks, tiers and kept ones of each KV head, tokens read before
    "alike": (16, 24, [3, 3], [2, 2], [[(4, 3.0)]] * 2, [5, 5], 14),
    "others in each head": (16, 24, [3, 4], [2, 1], [[(4, 3.0)], [(3, 2.5)]], [5, 6], 14),
    "tiers of other sizes": (16, 24, [3] * 4, [2] * 4, [[(4, 3.0)]] * 4, [5, 9, 5, 2], 14),
    "no sinks": (24, 8, [3, 3], [0, 0], [[(4, 3.0)]] * 2, [5, 5], 14),
    "while sinks fill": (8, 16, [5, 5], [4, 4], [[(4, 3.0)]] * 2, [5, 5], 3),
    "from the first token on": (8, 8, [2, 2], [2, 2], [[(2, 3.0)]] * 2, [3, 3], 0),
    "more than a tile": (40, 32, [40, 40], [2, 2], [[(14, 3.0)]] * 2, [45, 45], 90),
}


def layer_of(head_dim, value_dim, window, sinks, tiers, heavy_hitters, smooth_keys=False):
    heads, generator = len(window), torch.Generator().manual_seed(0)
    options = {"value_dim": value_dim, "smooth_keys": smooth_keys}
    layer = LinearAttention("none", [0] * heads, head_dim, window, sinks, "int8", tiers, heavy_hitters, **options)
    for coded_tiers in layer.coded_tiers.values():
        for coder in (coded_tiers.key, coded_tiers.value):
            coder.calibrate(Moments.of(torch.randn(coder.heads, 300, coder.dim, generator=generator) + 0.3))
    return layer.requires_grad_(False)


def text_of(layer, batch, length, groups, dtype=torch.float32):
    generator, heads = torch.Generator().manual_seed(1), sum(map(len, layer.groups))
    coded_tiers = next(iter(layer.coded_tiers.values()))
    sizes = ((heads * groups, coded_tiers.key.dim), (heads, coded_tiers.key.dim), (heads, coded_tiers.value.dim))
    return [torch.randn(batch, n, length, dim, generator=generator).to(dtype) for n, dim in sizes]


def read(layer, text, weight, cuts, states=None, in_place=False):
    """Outputs and states; of the parts of a text that are one token, by whatever takes them."""
    out = []
    for a, b in pairwise(cuts):
        part = [x[:, :, a:b] for x in text]
        own = None if weight is None else weight[:, a:b]
        piece, states = layer(*part, scaling=SCALING, weight=own, states=states, in_place=in_place)
        out.append(piece)
    return torch.cat(out, 2), states


def moved(x, device):
    return [None if t is None else t.to(device) for t in x]


def check(layer, text, weight, before):
    """Tokens after ``before`` others, which plain torch or the compiled kernels read."""
    length = text[0].shape[2]
    cuts = [before, *range(before + 1, length + 1)]
    states = read(layer, text, weight, [0, before])[1] if before else None
    wanted, after = read(layer, text, weight, cuts, states)
    own, *text = copy.deepcopy(layer).to(DEVICE), *moved(text, DEVICE)
    (weight,) = moved([weight], DEVICE)
    states = states and [state.map(lambda x: x.to(DEVICE)) for state in states]
    held = copy.deepcopy(states)
    with calls_of_kernels() as called:
        found, mine = read(own, text, weight, cuts, states)
    assert not called  # those are the kernels of longer parts
    assert not states or all(torch.equal(a.tokens, b.tokens) for a, b in zip(states, held, strict=True))
    assert own._layouts[0] in _DECODERS
    for state, other in zip(mine, after, strict=True):
        assert torch.equal(state.tokens.cpu(), other.tokens)
    return found.cpu(), wanted


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        *((sizes, 2) for sizes in LAYERS),
        pytest.param("alike", 1, marks=pytest.mark.interpreter),
        pytest.param("tiers of other sizes", 1, marks=pytest.mark.interpreter),
    ],
)
def test_states_and_outputs_are_those_of_plain_torch(sizes, groups):
    *shape, before = LAYERS[sizes]
    layer = layer_of(*shape)
    text = text_of(layer, 2, before + 5, groups)
    found, wanted = check(layer, text, None, before)
    # Sums of some dozen numbers of the size of values, with weights that scores of the size of ten are off by.
    assert (found - wanted).abs().max() < 256 * torch.finfo(torch.float32).eps * text[2].abs().max()


@pytest.mark.parametrize("sizes", [pytest.param("no sinks", marks=pytest.mark.interpreter), "more than a tile"])
def test_as_many_rows_parts_and_moves_as_large_models_take(sizes, monkeypatch):
    from dofla.attention.gpu import token

    monkeypatch.setattr(token, "ROWS", 16)
    monkeypatch.setattr(token, "TILE", 16)
    monkeypatch.setattr(token, "MOVED", 512)  # bytes: some four tokens at once
    *shape, before = LAYERS[sizes]
    layer = layer_of(*shape)
    text = text_of(layer, 1, before + 3, 18)
    found, wanted = check(layer, text, None, before)
    assert (found - wanted).abs().max() < 256 * torch.finfo(torch.float32).eps * text[2].abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_with_a_bias_and_outlier_channels(dtype):
    *shape, before = LAYERS["alike"]
    layer = layer_of(*shape, smooth_keys=True)
    query, key, value = text_of(layer, 2, before + 5, 2)
    key[..., 3] *= 40
    key[..., 5:9] += 150
    query[..., 3] /= 40
    layer.smoothing.calibrate(Moments.of(key.transpose(0, 1).flatten(1, 2)))
    assert (layer.smoothing.scale > 1).any()
    found, wanted = check(layer, [x.to(dtype) for x in (query, key, value)], None, before)
    apart = torch.finfo(dtype).eps * (256 if dtype == torch.float32 else 2)
    assert (found.double() - wanted.double()).abs().max() < apart * value.abs().max()


def test_padding_before_and_between():
    *shape, before = LAYERS["alike"]
    layer = layer_of(*shape)
    text, weight = text_of(layer, 3, before + 5, 2), torch.ones(3, before + 5)
    weight[1, :7], weight[0, before + 2], weight[2] = 0, 0, 0
    found, wanted = check(layer, text, weight, before)
    off = (found - wanted).abs() * weight[:, None, before:, None]
    assert off.max() < 256 * torch.finfo(torch.float32).eps * text[2].abs().max()


@pytest.mark.interpreter
def test_padding_alone_changes_no_state():
    *shape, before = LAYERS["while sinks fill"]
    layer = layer_of(*shape).to(DEVICE)
    text = moved(text_of(layer, 2, before + 1, 2), DEVICE)
    _, states = read(layer, text, None, [0, before])
    rows = torch.cat([state.tokens for state in states], 1)
    own, held = list(rows.split([state.tokens.shape[1] for state in states], 1)), rows.clone()
    token, log_weight = [x[:, :, before:] for x in text], torch.tensor([[0.0], [LOG_ZERO]], device=DEVICE)
    decode(layer.layouts, *token, log_weight, own, SCALING, in_place=True)
    assert not torch.equal(rows[0], held[0])
    assert torch.equal(rows[1], held[1])


def test_bfloat16():
    *shape, before = LAYERS["others in each head"]
    layer = layer_of(*shape)
    text = text_of(layer, 1, before + 5, 2, torch.bfloat16)
    found, wanted = check(layer, text, None, before)
    assert found.dtype == torch.bfloat16
    off = (found.float() - wanted.float()).abs().max()
    assert off <= torch.finfo(torch.bfloat16).eps * wanted.float().abs().max()  # rounded once, perhaps to a neighbor


def test_other_memories_are_read_as_longer_parts_are():
    shape = (16, 8, [3, 3], [2, 2], [[(2, 4.0), (3, 3.0)]] * 2, [4, 4])
    layer, before = layer_of(*shape), 12
    text = text_of(layer, 1, before + 2, 1)
    states = read(layer, text, None, [0, before])[1]
    wanted, after = read(layer, text, None, [before, before + 1], states)
    own = copy.deepcopy(layer).to(DEVICE)
    states = [state.map(lambda x: x.to(DEVICE)) for state in states]
    with calls_of_kernels() as called, pytest.MonkeyPatch.context() as patch:
        patch.setattr("dofla.attention.compiled.usable", lambda *_: False)
        found, mine = read(own, moved(text, DEVICE), None, [before, before + 1], states)
    assert called == ["attend", "select_survivors", "attend"]
    assert own._layouts[0] not in _DECODERS
    assert (found.cpu() - wanted).abs().max() < 256 * torch.finfo(torch.float32).eps * text[2].abs().max()
    opened = [layer.layout_of(0).opened(x) for x in (mine[0].map(lambda x: x.cpu()), after[0])]
    assert isinstance(opened[0], State)
    assert torch.equal(opened[0].tiers[1].key, opened[1].tiers[1].key)
    assert (opened[0].window.log_weight > LOG_ZERO).all()


@pytest.mark.interpreter
def test_states_are_updated_in_their_pages():
    *shape, before = LAYERS["tiers of other sizes"]
    layer = layer_of(*shape)
    text = text_of(layer, 2, before + 2, 2)
    _, states = read(layer, text, None, [0, before])
    wanted, after = read(layer, text, None, [before, before + 1, before + 2], states)
    sizes, pages = [state.tokens.shape[1] for state in states], torch.tensor([3, 1])
    whole = torch.randint(0, 256, (5, sum(sizes) + 16), dtype=torch.uint8)
    others = whole[[0, 2, 4]], whole[:, -16:].clone()
    whole[pages, :-16] = torch.cat([state.tokens for state in states], 1)
    own, whole, pages = copy.deepcopy(layer).to(DEVICE), whole.to(DEVICE), pages.to(DEVICE)
    pools, text = list(whole[:, :-16].split(sizes, 1)), moved(text, DEVICE)
    with calls_of_kernels() as called:
        for n in range(2):
            inputs = [x[:, :, before + n : before + n + 1].transpose(0, 2) for x in text]
            out = read_pages(own, *inputs, scaling=SCALING, pools=pools, pages=pages, starts=[0, 1, 2]).transpose(0, 2)
            off = (out.cpu() - wanted[:, :, n : n + 1]).abs().max()
            assert off < 256 * torch.finfo(torch.float32).eps * text[2].abs().max()
    assert not called
    assert own._layouts[0] in _DECODERS
    assert torch.equal(whole[pages, :-16].cpu(), torch.cat([state.tokens for state in after], 1))
    assert torch.equal(whole[[0, 2, 4]].cpu(), others[0])
    assert torch.equal(whole[:, -16:].cpu(), others[1])


class _Operations(TorchDispatchMode):
    """Names of those of torch that a GPU would be given, or wait for; views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        name, places = operation._schema.name.removeprefix("aten::"), "empty" in operation._schema.name
        if not operation.is_view and not places:
            self.names.append(name)
        return result


def test_coders_that_were_calibrated_again_are_those_of_the_next_token():
    *shape, before = LAYERS["tiers of other sizes"]
    layer = layer_of(*shape).to(DEVICE)
    text = moved(text_of(layer, 1, before + 1, 1), DEVICE)
    _, states = read(layer, text, None, [0, before])
    with calls_of_kernels():
        found = [read(layer, text, None, [before, before + 1], states)[0]]
        ((_, decoder),) = decoders_of(layer.layouts)
        places = [coder.constants.data_ptr() for coder in decoder.coders()]
        for change in (
            lambda coder: coder.mean.add_(1),
            lambda coder: setattr(coder, "constants", 2 * coder.constants),
        ):
            for coded_tiers in layer.coded_tiers.values():
                change(coded_tiers.value)  # written, and replaced
            found.append(read(layer, text, None, [before, before + 1], states)[0])
            assert torch.equal(found[-1], read(copy.deepcopy(layer), text, None, [before, before + 1], states)[0])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    assert places == [coder.constants.data_ptr() for coder in decoder.coders()]  # where CUDA graphs read them


@pytest.mark.interpreter
def test_rows_that_merely_touch_are_not_common():
    from dofla.attention.gpu.side_by_side import common_rows

    memory = bytearray(64)
    apart = [torch.frombuffer(memory, dtype=torch.uint8, offset=n, count=32).view(1, 32) for n in (0, 32)]
    assert common_rows(apart) is None
    whole = torch.zeros(3, 80, dtype=torch.uint8)
    assert torch.equal(common_rows(list(whole[:, 16:].split(32, 1))), whole[:, 16:])


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that were launched."""
    from triton.runtime.interpreter import GridExecutor

    names, run = [], GridExecutor.__call__

    def launch(self, *args, **options):
        names.append(self.fn.__name__)
        with _disable_current_modes():  # what the interpreter does with tensors is no operation
            run(self, *args, **options)

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    return names


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED, reason="counts launches, which the interpreter tells of")
@pytest.mark.parametrize("sizes", ["alike", "tiers of other sizes"])
def test_a_token_is_two_launches_and_waits_for_nothing(sizes, launched):
    *shape, before = LAYERS[sizes]
    layer = layer_of(*shape)
    text = text_of(layer, 1, before + 2, 2)
    with calls_of_kernels():
        _, states = read(layer, text, None, [0, before, before + 1])  # tables are on the device then
        launched.clear()
        with _Operations() as counted:
            read(layer, text, None, [before + 1, before + 2], states, in_place=True)
    assert launched == ["encode_and_rotate", "attend_and_update"]
    assert counted.names == ["cat"]  # the test's own


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED, reason="counts launches, which the interpreter tells of")
def test_a_token_of_pages_is_two_launches_and_nothing_else(launched):
    *shape, before = LAYERS["alike"]
    layer = layer_of(*shape)
    text = text_of(layer, 2, before + 2, 2)
    _, states = read(layer, text, None, [0, before])
    sizes, pages = [state.tokens.shape[1] for state in states], torch.tensor([1, 0])
    pools = list(torch.cat([state.tokens for state in states], 1).split(sizes, 1))
    with calls_of_kernels():
        for n in range(before, before + 2):
            launched.clear()
            inputs = [x[:, :, n : n + 1].transpose(0, 2) for x in text]
            with _Operations() as counted:  # tables are on the device at the second token
                read_pages(layer, *inputs, scaling=SCALING, pools=pools, pages=pages, starts=[0, 1, 2])
    assert launched == ["encode_and_rotate", "attend_and_update"]
    assert not counted.names
