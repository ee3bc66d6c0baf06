"""The readable compressed cache: where a token goes, and eviction rules that can be swapped, in models as well."""

import pytest
import torch
from compressed_heads import SCALING, heads_of

from dofla.attention import HeadSizes
from dofla.attention.naive_cache import HeavyHitters, NaiveCache
from dofla.compression.retention import retention
from dofla.errors import DoflaError

SIZE, LENGTH = HeadSizes(window=4, sinks=2, newest=3, heavy_hitters=5), 40


class Oldest:
    """Evict by age: all scores are alike, and of several the oldest token goes."""

    def decay(self, score):
        return score

    def score(self, weights):
        return torch.zeros_like(weights[:, 0])


class Mean(Oldest):
    """Evict by attention so far, without forgetting: the sum of weights."""

    def score(self, weights):
        return weights.sum(1)


def text(seed=0, length=LENGTH):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, *shape, 16, generator=generator) for shape in ((2, 3), (2,), (2,))]


def read(retention=None, size=SIZE, seed=0):
    """A cache that has read a text, and the outputs."""
    tier = heads_of(0, [size] * 2, 16, 16).tiers[0]
    cache = NaiveCache(size, tier, SCALING, retention)
    return cache, torch.stack([cache.step(*token) for token in zip(*text(seed), strict=True)])


def places(cache, tier):
    """The places in the text of the tokens in the tier, by their codes."""
    key = text()[1].transpose(0, 1)[None]
    codes = tier.key.encode(key)[0][0]  # [Hkv, L, bytes]
    return [[int((codes[n] == own).all(-1).nonzero()[0]) for own in cache.codes[0][0][n]] for n in range(2)]


def test_tokens_stay_in_the_window_then_as_sinks_then_in_the_tier():
    cache, _ = read()
    assert cache.window[0].shape == (2, SIZE.window, 16)
    assert cache.sinks[0].shape == (2, SIZE.sinks, 16)
    key = text()[1].transpose(0, 1).double()
    for held, places_of in ((cache.window, slice(-SIZE.window, None)), (cache.sinks, slice(SIZE.sinks))):
        assert (held[0] - key[:, places_of]).abs().max() < key.abs().max() / 100  # seven bits
    tier = heads_of(0, [SIZE] * 2, 16, 16).tiers[0]
    for own in places(cache, tier):
        assert len(own) == SIZE.newest + SIZE.heavy_hitters
        assert own == sorted(own, reverse=True)  # the newest first, whatever was evicted
        end = LENGTH - SIZE.window
        assert own[: SIZE.newest] == list(range(end - SIZE.newest, end))[::-1]


def test_with_room_for_all_tokens_attention_is_that_of_softmax():
    query, key, value = (x.double() for x in text())
    _, out = read(size=HeadSizes(LENGTH, 0, 1, 1))
    scores = SCALING * torch.einsum("lhgd,mhd->hglm", query, key)
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    wanted = torch.einsum("hglm,mhd->lhgd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)
    assert (out - wanted).abs().max() < 0.05  # all tokens in int8


def test_a_rule_of_eviction_is_a_small_class():
    tier = heads_of(0, [SIZE] * 2, 16, 16).tiers[0]
    cache, _ = read(Oldest())
    end = LENGTH - SIZE.window
    assert places(cache, tier) == [list(range(end - SIZE.newest - SIZE.heavy_hitters, end))[::-1]] * 2
    by_rule = {rule: places(read(rule())[0], tier) for rule in (Oldest, Mean, HeavyHitters)}
    assert by_rule[Oldest] != by_rule[Mean] != by_rule[HeavyHitters] != by_rule[Oldest]
    assert places(read()[0], tier) == by_rule[HeavyHitters]


@pytest.mark.parametrize("score", [0, 1, 255, 256, 257, 512, 32767])
def test_heavy_hitters_forget_a_256th_rounded_up(score):
    assert HeavyHitters().decay(torch.tensor(float(score))).item() == score - -(-score // 256)


def test_heavy_hitters_count_squared_weights_in_whole_numbers():
    weights = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    assert HeavyHitters().score(weights).tolist() == [[1024 + 4096, 1024, 0]]


@torch.no_grad()
def test_in_a_model_the_kernels_rule_gives_its_own_answers_and_another_gives_others(tiny):
    model, ids = tiny.compressed(tiny.llama()).double(), tiny.tokens(2, 40)
    own = model(ids, use_cache=False).logits
    with retention(model, HeavyHitters) as same:
        # Both attend in float64 to decoded tokens in float32.
        torch.testing.assert_close(same(ids, use_cache=False).logits, own, rtol=1e-4, atol=1e-4)
    with retention(model, Oldest):
        other = model(ids, use_cache=False).logits
    held = 4 + 2 + 5 + 6  # until that many tokens nothing is evicted
    torch.testing.assert_close(other[:, :held], own[:, :held], rtol=1e-4, atol=1e-4)
    assert (other - own)[:, held:].abs().max() > 0.01
    assert torch.equal(model(ids, use_cache=False).logits, own)


def test_padding_is_refused_under_another_rule(tiny):
    model = tiny.compressed(tiny.llama())
    with retention(model, Oldest), pytest.raises(DoflaError, match="is tried on text without padding"):
        model(**tiny.padded(2, 30, side="left"), use_cache=False)
