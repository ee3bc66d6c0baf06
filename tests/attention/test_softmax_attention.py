"""Causal softmax attention by the kernels, against float64."""

import pytest
import torch
from arithmetic import sum_error
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import needs_kernels

from dofla.attention.causal import causal
from dofla.attention.compiled.backend import Compiled

pytestmark = needs_kernels
SCALING = 0.3
DIMS = st.sampled_from([8, 24, 40, 64, 128])


def vectors(seed, batch, heads, length, dim, dtype):
    """As a model has them, tokens in front of heads in memory; of some size, so that scores differ."""
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(batch, length, heads, dim, generator=generator)).to(dtype).transpose(1, 2)


def right(query, key, value):
    query, key, value = (x.double() for x in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    scores = SCALING * query @ key.repeat_interleave(groups, 1).mT
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value.repeat_interleave(groups, 1)


@settings(max_examples=60)
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    groups=st.sampled_from([1, 2, 3, 6, 7, 40]),
    length=st.one_of(st.integers(1, 70), st.integers(500, 530), st.integers(1000, 1100)),
    dims=st.tuples(DIMS, DIMS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_it_is_that_of_float64(batch, kv_heads, groups, length, dims, dtype):
    query = vectors(0, batch, kv_heads * groups, length, dims[0], dtype)
    key, value = (
        vectors(1, batch, kv_heads, length, dims[0], dtype),
        vectors(2, batch, kv_heads, length, dims[1], dtype),
    )
    out = Compiled().softmax(query, key, value, SCALING)
    assert out.dtype == dtype
    most = float(value.abs().max())
    # Scores of order 20 are rounded, weights by as much; with AMX, weights in bfloat16.
    wrong = sum_error(length + dims[0], 20 * most) if dtype == torch.float32 else 0.1 * most
    assert (out.double() - right(query, key, value)).abs().max() <= wrong


@settings(max_examples=60)
@given(
    groups=st.sampled_from([1, 3, 7]),
    length=st.one_of(st.integers(1, 70), st.integers(500, 530)),
    before=st.sampled_from([0, 5, 70, 600]),
    padding=st.integers(0, 40),
    free=st.floats(0, 1),
    seed=st.integers(0, 100),
)
def test_what_is_not_real_is_seen_by_nobody(groups, length, before, padding, free, seed):
    """Free slots before the queries' tokens, others for each head, and padding in front of those."""
    query = vectors(seed, 2, 2 * groups, length, 16, torch.float32)
    key, value = (vectors(seed + n, 2, 2, before + length, 16, torch.float32) for n in (1, 2))
    real = torch.rand(2, 2, before + length, generator=torch.Generator().manual_seed(seed)) >= free
    real[:, :, before:] = True
    if not before:
        real[0, :, :padding] = False
    out = Compiled().softmax(query, key, value, SCALING, real)
    wanted = causal(query.double(), key.double(), value.double(), SCALING, real)
    assert (out - wanted).abs().max() <= sum_error(before + length + 16, 20 * float(value.abs().max()))


def test_weights_of_all_sizes():
    """Scores that rise by hundreds: what was summed before a larger one counts for nothing."""
    length = 1200
    query = torch.full((1, 1, length, 8), 10.0)
    key = (torch.arange(length)[:, None] / 4).expand(1, 1, length, 8).contiguous()
    value = vectors(0, 1, 1, length, 8, torch.float32)
    out = Compiled().softmax(query, key, value, SCALING)
    assert (out - right(query, key, value)).abs().max() <= 1e-4 * value.abs().max()
    out = Compiled().softmax(query, -key, value, SCALING)
    assert (out - value[:, :, :1]).abs().max() <= 1e-2 * value.abs().max()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_no_number_makes_none(bad):
    """Of a query its own row, of a key or value those from its token on, of the heads that see it."""
    whole = [vectors(n, 1, heads, 90, 16, torch.float32) for n, heads in enumerate((4, 2, 2))]
    fine = Compiled().softmax(*whole, SCALING)
    for which, rows in ((0, slice(70, 71)), (1, slice(70, None)), (2, slice(70, None))):
        given = [x.clone() for x in whole]
        given[which][0, 1, 70, 3] = bad
        out = Compiled().softmax(*given, SCALING)
        wrong = torch.zeros(out.shape[:3], dtype=torch.bool)
        wrong[0, 1 if which == 0 else slice(2, 4), rows] = True
        assert out[wrong].isnan().all()
        assert torch.equal(out[~wrong], fine[~wrong])
