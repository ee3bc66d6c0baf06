"""No features: softmax over the window and the sinks, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from arithmetic import LOGITS
from dofla.feature_maps.layer import LinearAttention
from hypothesis import given, settings
from hypothesis import strategies as st
from making import make, vectors
from torch.testing import assert_close

import dofla
from dofla.attention import LOG_ZERO
from dofla.errors import DoflaError
from dofla.integration.student import Student
from dofla.plans.plan import LayerPlan

SCALING, KV_HEADS, SHARE, DIM = 0.7, 2, 2, 4
quick = settings(max_examples=40, deadline=None, derandomize=True)


def seen_by(i, real, window, sinks, causal):
    """Positions that query ``i`` attends to: those close by, and the first real ones."""
    return [j for n, j in enumerate(real) if (j <= i or not causal) and (abs(i - j) < window or n < sinks)]


def by_loops(query, key, value, weight, window, sinks, causal):
    out = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=torch.float64)
    for b in range(len(query)):
        real = [j for j in range(key.shape[2]) if weight is None or weight[b, j]]
        for h in range(query.shape[1]):
            for i in range(query.shape[2]):
                seen = seen_by(i, real, window, sinks, causal)
                shares = [math.exp(SCALING * (query[b, h, i] @ key[b, h // SHARE, j]).item()) for j in seen]
                for share, j in zip(shares, seen, strict=True):
                    out[b, h, i] += share / sum(shares) * value[b, h // SHARE, j]
    return out


@quick
@given(
    seed=st.integers(0, 2**31 - 1),
    length=st.integers(1, 9),
    sizes=st.sampled_from([(1, 0), (3, 0), (0, 1), (0, 2), (2, 1), (3, 2), (20, 0), (0, 20)]),
    causal=st.booleans(),
    padding=st.sampled_from(["none", "left", "right"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_attention_is_softmax_over_window_and_sinks(seed, length, sizes, causal, padding, dtype):
    window, sinks = sizes
    layer = LinearAttention("none", [1] * KV_HEADS, DIM, window, sinks)
    layer.reset_parameters(torch.Generator().manual_seed(0))
    heads = (KV_HEADS * SHARE, KV_HEADS, KV_HEADS)
    query, key, value = (
        vectors(2, count, length, DIM, seed=seed % 2**30 + n, dtype=torch.float64) for n, count in enumerate(heads)
    )
    weight = None
    if padding != "none":
        weight = torch.ones(2, length, dtype=torch.int64)
        weight[1, slice(0, length // 2) if padding == "left" else slice(length - length // 2, length)] = 0
    given = (x.to(dtype) for x in (query, key, value))
    out, _ = layer(*given, scaling=SCALING, weight=weight, causal=causal)
    expected = by_loops(query, key, value, weight, window, sinks, causal)
    real = torch.ones(2, length) if weight is None else weight
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    rows = real.bool()[:, None, :, None]
    assert_close(out.double() * rows, expected * rows, rtol=tolerance, atol=tolerance)
    assert torch.isfinite(out).all()


def test_it_holds_nothing_and_its_features_are_zero():
    feature_map, x = make("none"), vectors(2, 3, 4, 6)
    assert list(feature_map.state_dict()) == []
    assert (feature_map.log_key(x, SCALING) == LOG_ZERO).all()


@pytest.mark.parametrize(("window", "sinks"), [(4, 0), (3, 2), (1, 1), (0, 2)])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_decoding_step_by_step_is_the_sequence_at_once(tiny, family, window, sinks):
    model, tokens = getattr(tiny, family)(), tiny.tokens(2, 20)
    dofla.linearize(model, tiny.plan(model, features=1, feature_map="none", window=window, sinks=sinks))
    with torch.no_grad():
        whole, cache, steps = model(tokens, use_cache=False).logits, None, []
        for n in range(20):
            out = model(tokens[:, n : n + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
    assert_close(torch.cat(steps, dim=1), whole, **LOGITS)


def test_a_window_as_long_as_the_text_is_the_teacher(tiny):
    for model, tokens in ((tiny.llama(), {"input_ids": tiny.tokens(2, 20)}), (tiny.bert(), tiny.padded(2, 20))):
        dofla.linearize(model, tiny.plan(model, features=1, feature_map="none", window=20))
        real = tokens.get("attention_mask", torch.ones(2, 20)).unsqueeze(-1)
        with torch.no_grad():
            found = model(**tokens)[0]
            with dofla.softmax(model):
                assert_close(found * real, model(**tokens)[0] * real, **LOGITS)


def test_a_plan_without_window_and_sinks_is_refused():
    with pytest.raises(DoflaError, match=r"layer a: feature_map 'none' requires window > 0 or sinks > 0"):
        LayerPlan("a", 2, 4, 4, 1, feature_map="none")
    for sizes in ({"window": 1}, {"sinks": 1}, {"keep_softmax": True}):
        LayerPlan("a", 2, 4, 4, 1, feature_map="none", **sizes)


def test_a_student_of_it_is_saved_opened_and_has_nothing_to_train(tiny, tmp_path):
    model, tokens = tiny.llama(), tiny.tokens(2, 20)
    dofla.linearize(model, tiny.plan(model, features=1, feature_map="none", window=3, sinks=1))
    with pytest.raises(DoflaError, match="nothing to train"):
        dofla.distill(model, tokens)
    model.save_pretrained(tmp_path)
    opened = dofla.load(tmp_path)
    assert [layer.exact_tokens for layer in Student.of(opened).layers.values()] == [[(3, 1)]] * 2
    with torch.no_grad():
        assert_close(opened(tokens).logits, model(tokens).logits, rtol=0, atol=0)


@pytest.mark.parametrize("model", ["llama", "bert"])
@torch.no_grad()
def test_no_feature_at_all_is_as_one_that_sees_nothing(tiny, model):
    outputs = []
    for features in (0, 1):
        student = getattr(tiny, model)()
        dofla.linearize(student, tiny.plan(student, features, window=3, sinks=1, feature_map="none"))
        outputs.append(student(**tiny.padded(2, 20))[0])
        for layer in Student.of(student).layers.values():
            layer.hides_tokens = True
        assert torch.isfinite(student(**tiny.padded(2, 20))[0]).all()
    # The kernels take the one, plain torch the other.
    assert_close(outputs[0], outputs[1], **LOGITS)
