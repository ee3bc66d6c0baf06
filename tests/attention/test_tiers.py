"""A compressed cache against every pair written out in float64, and its state however a text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from forms import padding
from hypothesis import given, settings
from hypothesis import strategies as st
from tier_inputs import HEAD, SCALING, VALUE, inputs

from dofla.attention import LOG_ZERO, CodedTiers, Moments, attend, rounded
from dofla.attention.coding.operations import PLAIN
from dofla.feature_maps import PRF
from dofla.feature_maps.none import NoFeatures


def memory(key, value, tiers):
    coded_tiers = CodedTiers(key.shape[1], HEAD, VALUE, tiers)
    for coder, x in ((coded_tiers.key, key), (coded_tiers.value, value)):
        coder.calibrate(Moments.of(x.transpose(0, 1).flatten(1, 2)))
    return coded_tiers


def oracle(query, key, value, coded_tiers, weight, window, sinks):
    """[B, H, L, dv] in float64: each query's softmax over the keys it still has, as they are at their age."""
    batch, kv_heads, length, _ = key.shape
    query, groups = query.double(), query.shape[1] // kv_heads
    keys = [key, *PLAIN.chain(coded_tiers.key, key)]
    values = [value, *PLAIN.chain(coded_tiers.value, value)]
    out = torch.zeros(batch, query.shape[1], length, value.shape[-1], dtype=torch.float64)
    starts = [0, window]
    for count in coded_tiers.counts:
        starts.append(starts[-1] + count)
    for b in range(batch):
        real = torch.ones(length) if weight is None else weight[b]
        # A key becomes a sink as it leaves the window, unless its place is in the window still.
        first = [j for j in range(length) if real[j] > 0][:sinks]
        for i in range(length):
            seen = []
            for j in range(i + 1):
                age = i - j
                tier = next((n for n, (a, z) in enumerate(pairwise(starts)) if a <= age < z), None)
                if j in first:
                    tier = 0
                if real[j] > 0 and tier is not None:
                    seen.append((j, tier))
            for h in range(query.shape[1]) if seen else ():
                k = torch.stack([keys[tier][b, h // groups, j].double() for j, tier in seen])
                v = torch.stack([values[tier][b, h // groups, j].double() for j, tier in seen])
                scores = SCALING * k @ query[b, h, i] + torch.tensor([real[j] for j, _ in seen]).double().log()
                out[b, h, i] = scores.softmax(0) @ v
    return out


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    groups=st.integers(1, 2),
    length=st.integers(1, 40),
    window=st.sampled_from([0, 1, 5]),
    sinks=st.sampled_from([0, 2]),
    tiers=st.sampled_from([((3, 4.0),), ((4, 4.0), (7, 2.5)), ((2, 5.0), (3, 3.0), (50, 1.0))]),
    kind=st.sampled_from(["none", "left", "right", "any"]),
)
def test_each_query_sees_tokens_as_old_as_they_are(seed, groups, length, window, sinks, tiers, kind):
    query, key, value = inputs(seed, 2, 2, groups, length)
    weight = padding(kind, 2, length, torch.Generator().manual_seed(seed))
    coded_tiers = memory(key, value, tiers)
    options = {"scaling": SCALING, "weight": weight, "window": window, "sinks": sinks, "coded_tiers": coded_tiers}
    out, state = attend(query, key, value, NoFeatures(2, HEAD, 0), **options)
    wanted = oracle(query, key, value, coded_tiers, weight, window, sinks)
    # Scores are sums of d products of queries and keys, some rotated there and back; outputs averages of dv-vectors.
    size = max(key.abs().max().item() * query.abs().max().item() * HEAD * SCALING, 1.0)
    bound = 64 * size * torch.finfo(torch.float32).eps * max(value.abs().max().item(), 1.0)
    seen = torch.ones(2, length, dtype=torch.bool) if weight is None else weight > 0
    assert ((out.double() - wanted).abs() * seen[:, None, :, None]).max() < bound
    assert [len(tokens) for tokens in state.tiers] == coded_tiers.counts


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    length=st.integers(2, 90),
    cuts=st.lists(st.integers(1, 89), max_size=5),
    kind=st.sampled_from(["none", "left"]),
)
def test_the_state_is_the_same_however_a_text_is_cut(seed, length, cuts, kind):
    query, key, value = inputs(seed, 2, 2, 2, length)
    weight = padding(kind, 2, length, torch.Generator().manual_seed(seed))
    coded_tiers = memory(key, value, ((5, 4.0), (9, 3.0), (20, 1.5)))
    features = PRF(2, HEAD, 4)
    features.reset_parameters(torch.Generator().manual_seed(seed))
    options = {"scaling": SCALING, "window": 3, "sinks": 2, "coded_tiers": coded_tiers}
    _, together = attend(query, key, value, features, weight=weight, **options)
    state = None
    for a, b in pairwise(sorted({0, length, *(cut for cut in cuts if cut < length)})):
        part = None if weight is None else weight[:, a:b]
        _, state = attend(
            query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], features, weight=part, state=state, **options
        )
    for whole, pieces in zip(together.tiers, state.tiers, strict=True):
        for name in ("key", "key_scale", "value", "value_scale", "log_weight"):
            assert torch.equal(getattr(whole, name), getattr(pieces, name)), name


def test_what_leaves_the_last_tier_enters_the_features_as_it_was_remembered():
    query, key, value = inputs(0, 1, 2, 1, 30)
    coded_tiers = memory(key, value, ((4, 4.0), (6, 2.0)))
    features = PRF(2, HEAD, 4)
    features.reset_parameters(torch.Generator().manual_seed(0))
    _, state = attend(query, key, value, features, scaling=SCALING, window=3, coded_tiers=coded_tiers)
    left = slice(0, 30 - 3 - 4 - 6)
    old_keys, old_values = (
        PLAIN.chain(coded_tiers.key, key)[-1][:, :, left],
        PLAIN.chain(coded_tiers.value, value)[-1][:, :, left],
    )
    b = features.log_key(old_keys, SCALING)
    eps = torch.finfo(torch.float32).eps
    # Sums over 17 keys of exponentials of sums over d numbers.
    bound = 17 * HEAD * eps * max(b.abs().max().item(), 1.0)
    torch.testing.assert_close(state.features.log_mass, b.double().logsumexp(-2), rtol=bound, atol=bound)
    wanted = torch.softmax(b.double(), -2).mT @ old_values.double()
    size = old_values.abs().max().item()
    torch.testing.assert_close(state.features.mean.double(), wanted, rtol=0, atol=4 * bound * size)


def test_reordering_and_bytes():
    query, key, value = inputs(0, 3, 2, 1, 12)
    coded_tiers = memory(key, value, ((4, 4.0), (6, 2.0)))
    _, state = attend(query, key, value, NoFeatures(2, HEAD, 0), scaling=SCALING, window=1, coded_tiers=coded_tiers)
    rotated = state.reorder(torch.tensor([2, 0, 0]))
    assert torch.equal(rotated.tiers[1].key[0], state.tiers[1].key[2])
    per_token = [coded_tiers.key.bytes_per_token(n) + coded_tiers.value.bytes_per_token(n) for n in range(2)]
    codes = 3 * 2 * (4 * per_token[0] + 6 * per_token[1])
    assert sum(tokens.bytes for tokens in state.tiers) == codes + 3 * 10 * 4  # and a log-weight for each token
    assert (state.tiers[0].log_weight == 0).all()
    assert (state.tiers[1].log_weight > LOG_ZERO).sum() == 3 * 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype):
    query, key, value = (x.to(dtype) for x in inputs(0, 1, 2, 1, 20))
    key, value = rounded(key), rounded(value)
    coded_tiers = memory(key.float(), value.float(), ((4, 4.0), (6, 2.0)))
    out, _ = attend(query, key, value, NoFeatures(2, HEAD, 0), scaling=SCALING, window=2, coded_tiers=coded_tiers)
    wanted = oracle(query, key, value, coded_tiers, None, 2, 0)
    # Decoded tokens are float32 whatever the rest is; the output is rounded to the dtype of values.
    eps = max(torch.finfo(dtype).eps, 64 * torch.finfo(torch.float32).eps * HEAD)
    assert (out.double() - wanted).abs().max() < eps * 4 * value.abs().max().item()
