"""The Triton kernels against the naive float64 form, on a GPU or in Triton's interpreter."""

import copy

import pytest
import torch
from device import DEVICE, INTERPRETED, calls_of_kernels, needs_device

from dofla.attention import Call, FeatureState, chunked, gpu, naive_attention, recurrent
from dofla.attention.constants import LOG_ZERO
from dofla.feature_maps.heads import FeatureHeads

pytestmark = needs_device


@pytest.fixture(autouse=True, scope="module")
def _interpreted_products_of_bfloat16():
    """Triton's interpreter keeps bfloat16 numbers as their bits, and its dot multiplies those: widen them first."""
    if not INTERPRETED:
        yield
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    dot = InterpreterBuilder.create_dot

    def widened(self, x, y, *rest):
        x, y = (self.cast_impl(t, tl.float32) if t.dtype.scalar == tl.bfloat16 else t for t in (x, y))
        return dot(self, x, y, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", widened)
        yield


SHAPES = [  # batch, KV heads, groups, length, features, value_dim
    (1, 1, 1, 2, 5, 6),
    (2, 1, 2, 63, 16, 16),
    (1, 2, 1, 64, 37, 6),
    (2, 2, 3, 65, 5, 16),
    (1, 1, 2, 200, 37, 33),
    (1, 1, 1, 130, 100, 150),
]


def make(batch, kv_heads, groups, length, features, value_dim, spread=2.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    a = spread * torch.randn(batch, kv_heads * groups, length, features, generator=g)
    b = spread * torch.randn(batch, kv_heads, length, features, generator=g)
    value = torch.randn(batch, kv_heads, length, value_dim, generator=g)
    return a.to(DEVICE), b.to(DEVICE), value.to(DEVICE)


def empty(b, value):
    batch, kv_heads, _, features = b.shape
    return FeatureState.empty(batch, kv_heads, features, value.shape[-1], device=b.device)


def truth(a, b, value, weight=None):
    """On the CPU: output [B, H, L, dv] and log-normalizer [B, H, L] in float64."""
    a, b, value = (t.double().cpu() for t in (a, b, value))
    out = naive_attention(a, b, value, weight=weight)
    b = b.repeat_interleave(a.shape[1] // b.shape[1], dim=1)
    pairs = torch.logsumexp(a.unsqueeze(-2) + b.unsqueeze(-3), dim=-1)
    hidden = torch.ones(pairs.shape[-2:], dtype=torch.bool).triu(1)
    return out, torch.logsumexp(pairs.masked_fill(hidden, -torch.inf), dim=-1)


def check(got, expected, tolerance):
    torch.testing.assert_close(got.double().cpu(), expected.double().cpu(), rtol=tolerance, atol=tolerance)


def check_state(got, expected, tolerance):
    assert got.mean.dtype == torch.float32
    assert got.log_mass.dtype == torch.float64
    check(got.mean, expected.mean, tolerance)
    check(got.log_mass, expected.log_mass, tolerance)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_states_are_those_of_float64(shape, dtype):
    a, b, value = make(*shape)
    value = value.to(dtype)
    out, normalizer, state = gpu.linear_attention(a, b, value, state=empty(b, value))
    assert out.dtype == normalizer.dtype == state.mean.dtype == torch.float32
    expected = truth(a, b, value)
    if dtype == torch.bfloat16:
        assert (out.double().cpu() - expected[0]).abs().max() / expected[0].abs().max() < 2e-2
        return
    check(out, expected[0], 1e-4)
    check(normalizer, expected[1], 1e-4)
    doubles = [t.double().cpu() for t in (a, b, value)]
    check_state(state, empty(*doubles[1:]).map(torch.Tensor.double).absorb(*doubles[1:]), 1e-4)


@pytest.mark.parametrize("order", ["first", "middle", "last", "rising", "falling", "random"])
@pytest.mark.parametrize("length", [64, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_features_of_hundreds(order, length, dtype):
    """Whichever key is the largest; where it comes late in a chunk, the rows before it are done again."""
    a, b, value = make(1, 2, 2, length, 16, 6, seed=1)
    a = (150 * a).clamp(-300, 300)
    ramp = torch.linspace(-300, 300, length, device=DEVICE)[:, None]
    if order == "random":
        b = (150 * b).clamp(-300, 300)
    elif order in ("rising", "falling"):
        b = (ramp if order == "rising" else -ramp).expand_as(b).contiguous()
    else:
        b = (20 * b - 200).clamp(-300, 300)
        b[:, :, {"first": 0, "middle": length // 2, "last": -1}[order]] = 300
    value = (1 + value.abs()).to(dtype)  # bounded away from 0, so that the error is one of the weights
    out, normalizer, state = gpu.linear_attention(a, b, value, state=empty(b, value))
    expected = truth(a, b, value)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert ((out.double().cpu() - expected[0]).abs() / expected[0]).max() < tolerance
    check(normalizer, expected[1], 1e-4 if dtype == torch.float32 else 2e-2)
    assert torch.isfinite(state.mean).all()
    assert torch.isfinite(state.log_mass).all()


@pytest.mark.parametrize(("cuts", "spread"), [((1,), 2), ((64,), 2), ((1, 2, 70), 100), ((63, 128, 140), 2)], ids=str)
def test_any_split_into_calls_is_one_call(cuts, spread):
    a, b, value = make(2, 2, 2, 141, 16, 16, spread)
    once = gpu.linear_attention(a, b, value, state=empty(b, value))
    state, pieces = empty(b, value), []
    for part in torch.tensor_split(torch.arange(141), cuts):
        part = slice(int(part[0]), int(part[-1]) + 1)
        out, normalizer, state = gpu.linear_attention(a[:, :, part], b[:, :, part], value[:, :, part], state=state)
        pieces.append((out, normalizer))
    outs, normalizers = zip(*pieces, strict=True)
    check(torch.cat(outs, dim=-2), once[0], 1e-4)
    check(torch.cat(normalizers, dim=-1), once[1], 1e-4)
    check_state(state, once[2], 1e-4)


@pytest.mark.interpreter
@pytest.mark.parametrize("shape", [(2, 2, 3, 70, 37, 6), (1, 1, 1, 70, 100, 150)], ids=str)
def test_decoding_is_prefill_and_the_recurrent_form(shape):
    a, b, value = make(*shape)
    _, _, start = gpu.linear_attention(a[:, :, :60], b[:, :, :60], value[:, :, :60], state=empty(b, value))
    all_at_once = gpu.linear_attention(a[:, :, 60:], b[:, :, 60:], value[:, :, 60:], state=start)
    plain = recurrent(a[:, :, 60:], b[:, :, 60:], value[:, :, 60:], state=start)
    state, kept = start, start.copy()
    for i in range(60, 70):
        part = slice(i, i + 1)
        out, normalizer, state = gpu.linear_attention(a[:, :, part], b[:, :, part], value[:, :, part], state=state)
        for other in (all_at_once, plain):
            check(out, other[0][:, :, i - 60 : i - 59], 1e-4)
            check(normalizer, other[1][:, :, i - 60 : i - 59], 1e-4)
    check_state(state, all_at_once[2], 1e-4)
    check_state(state, plain[2], 1e-4)
    assert torch.equal(start.mean, kept.mean)  # a state given is not changed


@pytest.mark.interpreter
def test_tensors_of_any_strides():
    """As models give them: heads after tokens; also rows that are not contiguous."""
    a, b, value = make(2, 2, 2, 70, 16, 16)
    expected = gpu.linear_attention(a, b, value, state=empty(b, value))
    for dims in ((1, 2), (2, 3)):
        strided = [t.transpose(*dims).contiguous().transpose(*dims) for t in (a, b, value)]
        check(gpu.linear_attention(*strided, state=empty(b, value))[0], expected[0], 1e-6)


@pytest.mark.interpreter
@pytest.mark.parametrize("length", [1, 30, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding(length, dtype):
    """Row 0 is all padding, row 1 is padded on the left."""
    a, b, value = make(2, 1, 2, length, 5, 6)
    weight = torch.ones(2, length)
    weight[0], weight[1, : length // 2] = 0, 0
    hidden = (weight == 0)[:, None, :, None].to(DEVICE)
    b, value = b + torch.where(hidden, LOG_ZERO, 0.0), value.masked_fill(hidden, 0).to(dtype)
    out, normalizer, state = gpu.linear_attention(a, b, value, state=empty(b, value))
    assert (out[0] == 0).all()
    assert (normalizer[0] == LOG_ZERO).all()
    assert (state.log_mass[0] == LOG_ZERO).all()
    assert (state.mean[0] == 0).all()
    check(out, truth(a, b, value, weight)[0], 1e-4 if dtype == torch.float32 else 2e-2)


@pytest.mark.interpreter
def test_chunked_gives_the_same_after_a_state():
    a, b, value = make(1, 2, 2, 100, 16, 6, spread=30.0)
    start = empty(b, value).absorb(b.flip(-2), value.flip(-2))
    got = gpu.linear_attention(a, b, value, state=start)
    expected = chunked(a, b, value, state=start)
    check(got[0], expected[0], 1e-4)
    check(got[1], expected[1], 1e-4)
    check_state(got[2], expected[2], 1e-4)


@pytest.mark.interpreter
@pytest.mark.parametrize("trained", [False, True])
def test_heads_with_features_are_those_of_float64(trained, monkeypatch):
    """With a window and sinks, in several calls; those that are trained are done in plain torch."""
    heads, called, kernels = FeatureHeads([0, 1], "prf", 5, 8, 6, window=4, sinks=2), [], gpu.linear_attention
    heads.reset_parameters(torch.Generator().manual_seed(0))
    query, key, value = (torch.randn(2, n, 40, 8, generator=torch.Generator().manual_seed(n)) for n in (4, 2, 3))
    text = query, key, value[:, :2, :, :6].contiguous()
    wanted, _ = copy.deepcopy(heads).double().step(Call(*(x.double() for x in text), 0.3), None)
    monkeypatch.setattr(gpu, "linear_attention", lambda *args, **options: called.append(1) or kernels(*args, **options))
    heads, found, state = heads.to(DEVICE).requires_grad_(trained), [], None
    with calls_of_kernels():
        for part in (slice(0, 30), slice(30, 31), slice(31, 40)):
            out, state = heads.step(Call(*(x[:, :, part].to(DEVICE) for x in text), 0.3), state)
            found.append(out)
    check(torch.cat(found, 2).detach(), wanted.detach(), 1e-4)
    assert len(called) == (0 if trained else 3)


def test_small_keys_are_not_lost_from_a_large_mass():
    a, b, value = make(1, 1, 1, 1, 16, 16)
    _, _, state = gpu.linear_attention(a, torch.full_like(b, 20.0), value, state=empty(b, value))
    for _ in range(100):
        _, _, state = gpu.linear_attention(a, torch.zeros_like(b), value, state=state)
    expected = torch.logaddexp(torch.tensor(20.0).double(), torch.tensor(100.0).double().log())
    check(state.log_mass, expected.expand_as(state.log_mass), 1e-13)
    b, value = (t.expand(-1, -1, 100, -1) for t in (torch.zeros_like(b), value))
    _, _, state = gpu.linear_attention(b, b, value, state=state)
    expected = torch.logaddexp(torch.tensor(20.0).double(), torch.tensor(200.0).double().log())
    check(state.log_mass, expected.expand_as(state.log_mass), 1e-13)


def test_who_is_served():
    x = torch.ones(1, 1, 2, 4, device=DEVICE)
    served = gpu.obstacle() is None  # not in the interpreter
    assert gpu.usable(x, x.bfloat16()) == served
    assert not gpu.usable(x.cpu())
    assert not gpu.usable(x, x.clone().requires_grad_())
    assert not gpu.usable(x.double())
    with torch.no_grad():
        assert gpu.usable(x.clone().requires_grad_()) == served
