"""How much of a text each KV head attends to on a second reading."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dofla
from dofla.compression.reading_shares import FRACTIONS, SecondReading, reading_shares
from dofla.integration.recorder import recording, run_body


def naive_attention(call):
    """The most attention that a query of the second half pays to each token of the first [Hkv, n]."""
    query, key = call.query[0].double(), call.key[0].double()
    heads, length, n = len(key), key.shape[1], key.shape[1] // 2
    found = torch.zeros(heads, n, dtype=torch.float64)
    for head in range(len(query)):
        for row in range(n, length):
            kv = head // (len(query) // heads)
            weights = (call.scaling * query[head, row] @ key[kv, : row + 1].T).softmax(-1)[:n]
            found[kv] = torch.maximum(found[kv], weights)
    return found


def test_attention_is_that_of_the_second_time_to_the_first(tiny):
    model, calls, found = tiny.llama().double(), [], SecondReading()
    with torch.no_grad(), recording(model, ["model.layers.1.self_attn"], calls.append):
        run_body(model, {"input_ids": tiny.tokens(1, 75).repeat(1, 2)})
    found(calls[0])
    torch.testing.assert_close(found.attention["model.layers.1.self_attn"].double(), naive_attention(calls[0]))


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 40), st.integers(0, 99))
def test_shares_are_parts_of_the_most_attended_tokens_of_all_heads(heads, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    attention = {f"{n}": torch.rand(own, tokens, generator=generator) for n, own in enumerate(heads)}
    ranked = sorted((x, n) for n, own in enumerate(torch.cat([*attention.values()]).tolist()) for x in own)
    wanted = [0.0] * sum(heads)
    for part in FRACTIONS:
        count = max(1, round(part * len(ranked)))
        for _, n in ranked[-count:]:
            wanted[n] += sum(heads) / count / len(FRACTIONS)
    shares = reading_shares(attention)
    assert [len(own) for own in shares.values()] == heads
    assert [share for own in shares.values() for share in own] == pytest.approx(wanted, abs=1e-5)


def test_a_calibration_has_it_of_every_head(tiny):
    found = dofla.calibrate(tiny.llama(), dofla.TokenWindows.of(tiny.tokens(2, 96)))
    assert found.reading.keys() == found.costs.keys()
    shares = [share for own in found.reading.values() for share in own]
    assert sum(shares) == pytest.approx(len(shares), rel=1e-5)
    even = dofla.calibrate(tiny.llama(), dofla.TokenWindows.of(tiny.tokens(2, 96)), head_budgets="even")
    assert not even.reading
