"""Keys with large biases and outlier channels: attention that is quantized stays near that of float64."""

from itertools import pairwise

import pytest
import torch
from forms import KernelCalls, needs_kernels
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.attention import CompressedHeads, HeadSizes, KeySmoothing, Moments, compiled, naive_attention, rounded
from dofla.layers import AttentionLayer

SCALING, HEADS, GROUPS, DIM = 0.125, 2, 3, 64


def keys_like_qwen(length: int, generator: torch.Generator) -> torch.Tensor:
    """Keys [1, HEADS, length, DIM] of noise, outlier channels, and a bias of norm 280 that RoPE has rotated: most of it
    in pairs that hardly rotate, some in pairs that rotate once in a few tokens."""
    key = torch.randn(1, HEADS, length, DIM, generator=generator)
    key[..., 5] *= 40
    angle = torch.arange(length)[:, None] * 1e6 ** (-torch.arange(DIM // 2) / (DIM / 2))
    bias = torch.zeros(HEADS, DIM // 2)
    bias[:, -3:], bias[:, 14], bias[:, 0] = 150.0, 40.0, 20.0
    key[0, :, :, : DIM // 2] += bias[:, None] * angle.cos()
    key[0, :, :, DIM // 2 :] += bias[:, None] * angle.sin()
    return key


def sample(length: int = 200) -> list[torch.Tensor]:
    """Queries that look at some keys more than at others, keys, and values."""
    generator = torch.Generator().manual_seed(0)
    key = keys_like_qwen(length, generator)
    query = torch.randn(1, HEADS * GROUPS, length, DIM, generator=generator) * 2
    query[..., 5] /= 20
    query[..., -3:] /= 20
    query[..., DIM // 2 - 3 : DIM // 2] /= 20
    return [query, key, torch.randn(1, HEADS, length, DIM, generator=generator)]


def softmax_of(query, key, value):
    """The oracle: causal softmax attention in float64."""
    query, key, value = (x.double() for x in (query, key, value))
    logits = torch.full((*query.shape[:-1], 1), -torch.inf), torch.zeros(1, HEADS, key.shape[2], 1)
    options = {"query": query, "key": key, "scaling": SCALING, "window": key.shape[2]}
    return naive_attention(*(x.double() for x in logits), value, **options)


def layer_for(key, *, smooth: bool, window: int, newest: int, bits: float) -> AttentionLayer:
    heads = CompressedHeads([HeadSizes(window, 2, newest, 8)] * HEADS, DIM, DIM, bits)
    layer = AttentionLayer([heads], KeySmoothing(HEADS, DIM) if smooth else None)
    layer.reset_parameters()
    moments = Moments.of(key[0])
    if smooth:
        layer.smoothing.calibrate(moments)
        _, moments = layer.smoothing.moments(moments, moments)
    heads.tiers[0].key.calibrate(moments)
    return layer


def run(layer, inputs, cuts):
    states, out = None, []
    for a, b in pairwise(cuts):
        piece, states = layer(*(x[:, :, a:b] for x in inputs), scaling=SCALING, states=states)
        out.append(piece)
    return torch.cat(out, 2), states


def off(found, wanted):
    """Root mean square of a difference; that of values is 1."""
    return (found.double() - wanted).square().mean().sqrt().item()


@pytest.mark.parametrize("backend", ["torch", pytest.param("compiled", marks=needs_kernels)])
@pytest.mark.parametrize(
    ("newest", "bits", "most"),
    [(8, 3.0, 0.03), (200, 5.0, 0.1)],  # all tokens in int8 but the first ones; most of them in five
    ids=["window", "tier"],
)
def test_biases_and_outlier_channels_cost_as_little_as_other_keys(backend, newest, bits, most, monkeypatch):
    inputs = sample()
    window = 200 if newest == 8 else 20
    if backend == "torch":
        monkeypatch.setattr(compiled, "usable", lambda *_: False)
    wanted = softmax_of(*inputs)
    errors = {}
    for smooth in (True, False):
        layer = layer_for(inputs[1], smooth=smooth, window=window, newest=newest, bits=bits)
        with KernelCalls() as calls:
            found, _ = run(layer, inputs, [0, 150, 199, 200])
        assert ("read_compressed" in calls.names) == (backend == "compiled")
        errors[smooth] = off(found, wanted)
    assert errors[True] < most
    assert errors[True] < errors[False] / 4


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_of_the_kernels_are_those_of_plain_torch(dtype, monkeypatch):
    inputs = [x.to(dtype) for x in sample()]
    layer = layer_for(inputs[1].float(), smooth=True, window=20, newest=60, bits=3.0)
    out, ours = run(layer, inputs, [0, 150, 199, 200])
    monkeypatch.setattr(compiled, "usable", lambda *_: False)
    _, plain = run(layer, inputs, [0, 60, 200])
    assert out.dtype == dtype
    assert torch.equal(ours[0].rows, plain[0].rows)


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 3), st.sampled_from([torch.float64, torch.float32]))
def test_scores_change_by_one_number_per_query(seed, heads, groups, dtype):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, heads * groups, 5, 16, generator=generator).to(dtype)
    key = (torch.randn(2, heads, 9, 16, generator=generator) * torch.randn(16, generator=generator).exp() + 3).to(dtype)
    smoothing = KeySmoothing(heads, 16)
    smoothing.calibrate(Moments.of(key[0]))
    asked, smooth = smoothing(query, key)
    assert asked.dtype == smooth.dtype == dtype
    before, after = (
        q.double() @ k.double().repeat_interleave(groups, 1).mT for q, k in ((query, key), (asked, smooth))
    )
    apart = before - after
    bound = 64 * torch.finfo(dtype).eps * 16 * query.abs().max() * (key.abs().max() + 3)
    assert (apart - apart.mean(-1, keepdim=True)).abs().max() < bound


def test_moments_are_those_of_smoothed_vectors():
    generator = torch.Generator().manual_seed(2)
    query, key = (torch.randn(2, 300, 8, generator=generator) * 5 + 7 for _ in range(2))
    smoothing = KeySmoothing(2, 8)
    smoothing.calibrate(Moments.of(key))
    found = smoothing.moments(Moments.of(query), Moments.of(key))
    asked, smooth = smoothing(query[None].double(), key[None].double())
    for mine, x in zip(found, (asked[0], smooth[0]), strict=True):
        wanted = Moments.of(x)
        assert mine.count == wanted.count
        torch.testing.assert_close(mine.total, wanted.total, rtol=1e-9, atol=1e-6)
        torch.testing.assert_close(mine.square, wanted.square, rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("keys", [torch.zeros(1, 50, 8), torch.full((1, 50, 8), 3.0)])
def test_keys_without_variance_are_left_at_their_size(keys):
    smoothing = KeySmoothing(1, 8)
    smoothing.calibrate(Moments.of(keys))
    assert torch.equal(smoothing.scale, torch.ones(1, 8))
    assert torch.equal(smoothing.mean, keys[:, 0])


def test_where_queries_ask_for_small_channels_every_channel_is_scaled():
    generator = torch.Generator().manual_seed(4)
    sizes = torch.exp2(-torch.arange(8.0))
    query = torch.randn(1, 400, 8, generator=generator) / sizes
    key = torch.randn(1, 400, 8, generator=generator) * sizes
    outliers, smoothing = KeySmoothing(1, 8), KeySmoothing(1, 8)
    outliers.calibrate(Moments.of(key))
    smoothing.calibrate(Moments.of(key), Moments.of(query))
    errors = []
    for way in (outliers, smoothing):
        asked, smooth = way(query[None], key[None])
        errors.append((asked @ (rounded(smooth) - smooth).mT).square().mean())
    assert errors[1] < errors[0] / 4

    plain = KeySmoothing(1, 8)
    plain.calibrate(Moments.of(torch.randn(1, 400, 8, generator=generator)), Moments.of(query))
    assert torch.equal(plain.scale, torch.ones(1, 8))


def test_nobody_asks():
    smoothing = KeySmoothing(1, 8)
    smoothing.calibrate(Moments.of(torch.randn(1, 50, 8)), Moments.of(torch.zeros(1, 50, 8)))
    assert torch.equal(smoothing.scale, torch.ones(1, 8))
