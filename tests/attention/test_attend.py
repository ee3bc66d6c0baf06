"""Every form of the arithmetic against the naive float64 one."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from arithmetic import sum_error
from forms import attend, padding
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.attention import chunked, log_kernel, naive_attention, recurrent
from dofla.attention.constants import LOG_ZERO
from dofla.attention.state import FeatureState


class Linear(torch.nn.Module):
    """Log-features that are a linear map of the vectors: any range, any pattern, no assumption."""

    def __init__(self, heads, head_dim, features, spread, generator):
        super().__init__()
        self.features = features
        shape = (heads, features, head_dim)
        self.to_query = spread * torch.randn(shape, generator=generator, dtype=torch.float64)
        self.to_key = spread * torch.randn(shape, generator=generator, dtype=torch.float64)

    def log_query(self, x, scaling):
        groups = x.shape[1] // len(self.to_query)
        return x @ self.to_query.to(x.dtype).repeat_interleave(groups, 0).mT

    def log_key(self, x, scaling):
        return x @ self.to_key.to(x.dtype).mT


def make(seed, batch, heads, groups, length, head_dim=8, features=5, spread=1.0):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads * groups, length, head_dim, generator=g, dtype=torch.float64)
    k = torch.randn(batch, heads, length, head_dim, generator=g, dtype=torch.float64)
    v = torch.randn(batch, heads, length, 6, generator=g, dtype=torch.float64)
    return q, k, v, Linear(heads, head_dim, features, spread, g)


def oracle(q, k, v, fm, **kwargs):
    q, k, v = (t.double() for t in (q, k, v))
    scaling = kwargs.pop("scaling")
    return naive_attention(
        fm.log_query(q, scaling), fm.log_key(k, scaling), v, query=q, key=k, scaling=scaling, **kwargs
    )


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 3),
    heads=st.integers(1, 2),
    groups=st.integers(1, 3),
    length=st.integers(1, 300),
    window=st.sampled_from([0, 0, 1, 2, 7, 33, 400]),
    sinks=st.sampled_from([0, 0, 1, 3, 8]),
    kind=st.sampled_from(["none", "left", "right", "any"]),
    causal=st.booleans(),
    spread=st.sampled_from([0.3, 3.0, 30.0]),
)
def test_attend_is_the_oracle(seed, batch, heads, groups, length, window, sinks, kind, causal, spread):
    q, k, v, fm = make(seed, batch, heads, groups, length, spread=spread)
    weight = padding(kind, batch, length, torch.Generator().manual_seed(seed))
    options = {"scaling": 0.7, "weight": weight, "window": window, "sinks": sinks, "causal": causal}
    got, _ = attend(q, k, v, fm, **options)
    torch.testing.assert_close(got, oracle(q, k, v, fm, **options), rtol=1e-9, atol=1e-9)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    length=st.integers(2, 200),
    cuts=st.lists(st.integers(1, 199), max_size=6),
    window=st.sampled_from([0, 1, 5, 40]),
    sinks=st.sampled_from([0, 1, 4]),
    kind=st.sampled_from(["none", "left", "any"]),
)
def test_any_split_into_calls_is_one_call(seed, length, cuts, window, sinks, kind):
    q, k, v, fm = make(seed, 2, 2, 2, length)
    weight = padding(kind, 2, length, torch.Generator().manual_seed(seed))
    options = {"scaling": 0.7, "window": window, "sinks": sinks}
    bounds = [0, *sorted({c for c in cuts if c < length}), length]
    state, pieces = None, []
    for start, stop in pairwise(bounds):
        part = None if weight is None else weight[:, start:stop]
        out, state = attend(
            q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop], fm, weight=part, state=state, **options
        )
        pieces.append(out)
    expected = oracle(q, k, v, fm, weight=weight, **options)
    torch.testing.assert_close(torch.cat(pieces, -2), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("order", ["rising", "falling", "peak in the middle", "random"])
@pytest.mark.parametrize("reach", [30.0, 300.0])
def test_adversarial_orders_in_float32(order, reach):
    g = torch.Generator().manual_seed(0)
    length, features = 257, 16
    a = (torch.rand(1, 2, length, features, generator=g, dtype=torch.float64) - 0.5) * 2 * reach
    b = (torch.rand(1, 2, length, features, generator=g, dtype=torch.float64) - 0.5) * 2 * reach
    ramp = torch.linspace(-reach, reach, length, dtype=torch.float64)[:, None]
    if order == "rising":
        b = ramp + b / 10
    elif order == "falling":
        b = -ramp + b / 10
    elif order == "peak in the middle":
        b[:, :, length // 2] = reach
    b = b.clamp(-300, 300).float()
    a = a.float()
    v = 1 + torch.rand(1, 2, length, 4, generator=g)
    expected = naive_attention(a.double(), b.double(), v.double())
    for form in (chunked, recurrent):
        out, _, _ = form(a, b, v, state=FeatureState.empty(1, 2, features, 4))
        assert ((out - expected).abs() / expected.abs()).max() < sum_error(3, 300.0)  # log-features rounded a few times


@pytest.mark.parametrize(("window", "sinks", "causal"), [(0, 0, True), (3, 2, True), (0, 0, False), (3, 2, False)])
def test_gradients(window, sinks, causal):
    q, k, v, fm = make(1, 1, 1, 2, 9, head_dim=3, features=4)
    weight = torch.ones(1, 9)
    weight[0, :2] = 0
    tensors = [t.requires_grad_() for t in (q, k, v)]

    def run(q, k, v):
        return attend(q, k, v, fm, scaling=0.5, weight=weight, window=window, sinks=sinks, causal=causal)[0]

    assert torch.autograd.gradcheck(run, tensors)
    options = {"scaling": 0.5, "weight": weight, "window": window, "sinks": sinks, "causal": causal}
    probe = torch.randn_like(run(*tensors))
    ours = torch.autograd.grad((run(*tensors) * probe).sum(), tensors)
    theirs = torch.autograd.grad((oracle(*tensors, fm, **options) * probe).sum(), tensors)
    torch.testing.assert_close(ours, theirs)


def test_long_vectors_give_no_nan():
    q, k, v, fm = make(2, 1, 2, 1, 200, spread=60.0)
    out, state = attend(q.float(), k.float(), v.float(), fm, scaling=10.0, window=4, sinks=1)
    assert torch.isfinite(out).all()
    assert torch.isfinite(state.features.mean).all()


def test_half_precision_stays_close():
    q, k, v, fm = make(3, 1, 2, 2, 150)
    half = [t.bfloat16() for t in (q, k, v)]
    out, state = attend(*half, fm, scaling=0.7, window=4, sinks=2)
    assert out.dtype == torch.bfloat16
    assert state.features.mean.dtype == torch.float32
    assert state.window.key.dtype == torch.bfloat16
    expected = oracle(*half, fm, scaling=0.7, window=4, sinks=2)
    assert (out.double() - expected).abs().max() / expected.abs().max() < 2e-2


def test_state_keeps_its_size_and_can_be_copied_and_reordered():
    q, k, v, fm = make(4, 3, 2, 1, 60)
    first, rest = (tuple(t[:, :, part] for t in (q, k, v)) for part in (slice(40), slice(40, None)))
    options = {"scaling": 1.0, "window": 4, "sinks": 2}
    _, state = attend(*first, fm, **options)
    kept = state.copy()
    out, later = attend(*rest, fm, **options, state=state)
    assert later.bytes == state.bytes
    again, _ = attend(*rest, fm, **options, state=kept)
    torch.testing.assert_close(out, again)
    order = torch.tensor([2, 0, 1])
    swapped, _ = attend(*(t[order] for t in rest), fm, **options, state=kept.reorder(order))
    torch.testing.assert_close(swapped, out[order])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([1.0, 30.0, 200.0]))
def test_log_kernel_is_exact_in_float32(seed, spread):
    g = torch.Generator().manual_seed(seed)
    a = spread * torch.randn(2, 4, 7, 6, generator=g)
    b = spread * torch.randn(2, 2, 9, 6, generator=g)
    expected = torch.logsumexp(a.double().unsqueeze(-2) + b.double().repeat_interleave(2, 1).unsqueeze(-3), dim=-1)
    torch.testing.assert_close(log_kernel(a, b).double(), expected, rtol=1e-5, atol=1e-4)


def test_log_kernel_has_gradients_where_the_product_underflows():
    a = torch.tensor([[[[200.0, 0.0]]]], requires_grad=True)
    b = torch.tensor([[[[0.0, 200.0], [1.0, 1.0]]]], requires_grad=True)
    log_kernel(a, b).sum().backward()
    torch.testing.assert_close(b.grad[0, 0, 0].sum(), torch.tensor(1.0), rtol=sum_error(1, 200), atol=0)
    assert torch.isfinite(a.grad).all()


def test_a_row_that_sees_nothing_is_zero():
    q, k, v, fm = make(5, 1, 1, 1, 4)
    out, state = attend(q, k, v, fm, scaling=1.0, weight=torch.zeros(1, 4))
    assert (out == 0).all()
    assert (state.features.log_mass <= LOG_ZERO / 2).all()
