"""Every form of the arithmetic against the naive float64 one."""

from itertools import pairwise

import pytest
import torch
from arithmetic import sum_error
from forms import Opaque, attend, padding, sample
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.attention import log_kernel, naive_attention


def make(seed, batch, heads, groups, length, **options):
    """Vectors in float64 and a map that does not tell that it is affine."""
    s = sample(seed, batch=batch, heads=heads, groups=groups, length=length, **options)
    return *(x.double() for x in s.vectors), Opaque(s.features)


def oracle(q, k, v, fm, scaling, **kwargs):
    a, b = fm.log_query(q, scaling), fm.log_key(k, scaling)
    return naive_attention(a, b, v, query=q, key=k, scaling=scaling, **kwargs)


@settings(max_examples=60)
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


@settings(max_examples=40)
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


@pytest.mark.parametrize(("window", "sinks", "causal"), [(0, 0, True), (3, 2, True), (0, 0, False), (3, 2, False)])
def test_gradients(window, sinks, causal):
    q, k, v, fm = make(1, 1, 1, 2, 9, head_dim=3, features=4)
    weight = torch.ones(1, 9)
    weight[0, :2] = 0
    tensors = [t.requires_grad_() for t in (q, k, v)]
    options = {"scaling": 0.5, "weight": weight, "window": window, "sinks": sinks, "causal": causal}
    outputs = attend(*tensors, fm, **options)[0], oracle(*tensors, fm, **options)
    probe = torch.randn_like(outputs[0])
    ours, theirs = (torch.autograd.grad((out * probe).sum(), tensors) for out in outputs)
    torch.testing.assert_close(ours, theirs)


def test_long_vectors_give_no_nan():
    q, k, v, fm = make(2, 1, 2, 1, 200, spread=60.0)
    out, state = attend(q.float(), k.float(), v.float(), fm, scaling=10.0, window=4, sinks=1)
    assert torch.isfinite(out).all()
    assert torch.isfinite(state.features.mean).all()


@settings(max_examples=40)
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
