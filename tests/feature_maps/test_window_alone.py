"""Window and sinks without any features, the baseline of every hybrid: softmax over those tokens, and nothing else."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from making import make, vectors
from torch.testing import assert_close

import dofla
from dofla.attention import LOG_ZERO
from dofla.errors import DoflaError
from dofla.layers import layer_of
from dofla.plans.layers import FeatureLayer

SCALING, KV_HEADS, SHARE, DIM = 0.7, 2, 2, 4


def by_loops(query, key, value, weight, window, sinks, causal):
    out = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=torch.float64)
    for b in range(len(query)):
        real = [j for j in range(key.shape[2]) if weight is None or weight[b, j]]
        for h in range(query.shape[1]):
            for i in range(query.shape[2]):
                seen = [j for n, j in enumerate(real) if (j <= i or not causal) and (abs(i - j) < window or n < sinks)]
                shares = [math.exp(SCALING * (query[b, h, i] @ key[b, h // SHARE, j]).item()) for j in seen]
                for share, j in zip(shares, seen, strict=True):
                    out[b, h, i] += share / sum(shares) * value[b, h // SHARE, j]
    return out


@settings(max_examples=40, derandomize=True)
@given(
    seed=st.integers(0, 2**30),
    length=st.integers(1, 9),
    sizes=st.sampled_from([(1, 0), (3, 0), (0, 1), (0, 2), (2, 1), (3, 2), (20, 0), (0, 20)]),
    features=st.sampled_from([0, 1]),
    causal=st.booleans(),
    padded=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_attention_is_softmax_over_window_and_sinks(seed, length, sizes, features, causal, padded, dtype):
    plan = FeatureLayer("a", KV_HEADS, DIM, DIM, features, *sizes, feature_map="none")
    counts = KV_HEADS * SHARE, KV_HEADS, KV_HEADS
    inputs = [vectors(2, count, length, DIM, seed=seed + n, dtype=torch.float64) for n, count in enumerate(counts)]
    weight = (torch.arange(length) >= torch.tensor([[0], [length // 2]])).float() if padded else None
    out, _ = layer_of(plan)(*(x.to(dtype) for x in inputs), scaling=SCALING, weight=weight, causal=causal)
    rows = 1 if weight is None else weight[:, None, :, None]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    expected = by_loops(*inputs, weight, *sizes, causal)
    assert_close(out.double() * rows, expected * rows, rtol=tolerance, atol=tolerance)
    assert torch.isfinite(out).all()


def test_it_holds_nothing_and_its_features_are_zero():
    feature_map, x = make("none"), vectors(2, 3, 4, 6)
    assert list(feature_map.state_dict()) == []
    assert (feature_map.log_key(x, SCALING) == LOG_ZERO).all()


def test_it_is_saved_opened_and_has_nothing_to_train(tiny, tmp_path):
    model, tokens = tiny.llama(), tiny.tokens(2, 20)
    dofla.linear.linearize(model, tiny.plan(model, features=0, feature_map="none", window=3, sinks=1))
    with pytest.raises(DoflaError, match="nothing to train"):
        dofla.linear.distill(model, tokens)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert_close(dofla.load(tmp_path)(tokens).logits, model(tokens).logits, rtol=0, atol=0)
