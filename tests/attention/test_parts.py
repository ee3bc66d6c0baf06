"""Some KV heads of a layer, which a process has that shares a model with others, are a layer of their own."""

import pytest
import torch
from compressed_heads import MOST, SCALING, SIZE
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.attention import HeadSizes, Moments
from dofla.layers import layer_of, take_heads
from dofla.plans.layers import CompressedLayer

GROWS = HeadSizes(window=5, sinks=2, newest=1, heavy_hitters=0)


@settings(max_examples=25)
@given(st.lists(st.sampled_from([SIZE, MOST, GROWS]), min_size=1, max_size=6), st.data())
def test_they_give_what_they_give_in_the_layer_of_all(sizes, data):
    heads = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True, min_size=1))
    plan = CompressedLayer("layer", len(sizes), 16, 24, *map(list, zip(*sizes, strict=True)))
    whole, part = layer_of(plan), layer_of(plan.of_heads(heads))
    generator = torch.Generator().manual_seed(0)

    def moments(count, dim):
        fall = torch.exp(-3 * torch.arange(dim) / dim)
        return Moments.of(torch.randn(count, 100, dim, generator=generator) * fall + 0.3)

    whole.smoothing.calibrate(moments(len(sizes), 16))
    for tier in whole.compressed.tiers:
        for coder in (tier.key, tier.value):
            coder.calibrate(moments(coder.heads, coder.dim))
    take_heads(part, whole, heads)
    shapes = (len(sizes) * 2, 16), (len(sizes), 16), (len(sizes), 24)
    query, key, value = (torch.randn(1, count, 70, dim, generator=generator) for count, dim in shapes)
    out, _ = whole(query, key, value, scaling=SCALING)
    queries = torch.tensor([2 * head + n for head in heads for n in range(2)])
    own, _ = part(query[:, queries], key[:, heads], value[:, heads], scaling=SCALING)
    torch.testing.assert_close(own, out[:, queries], rtol=1e-5, atol=1e-5)
    assert part.kv_heads == len(heads)


def test_their_plan_has_their_sizes():
    plan = CompressedLayer("layer", 3, 16, 16, window=[5, 6, 7], sinks=2, newest=[1, 2, 3], heavy_hitters=[9, 0, 4])
    part = plan.of_heads([2, 1])
    assert (part.kv_heads, part.sizes, part.bits) == (2, [HeadSizes(7, 2, 3, 4), HeadSizes(6, 2, 2, 0)], plan.bits)
    with pytest.raises(IndexError):
        plan.of_heads([3])
