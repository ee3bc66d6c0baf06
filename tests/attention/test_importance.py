"""Exact attention, and the importance of tokens, against float64."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.attention.importance import attention_and_importance


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(1, 40), st.integers(0, 9), st.integers(0, 99)
)
@settings(max_examples=40)
def test_it_is_causal_softmax_attention_and_its_squares(heads, groups, first, length, skipped, seed):
    """A row alone, and the other beside padding, in front of its first reading and behind its second."""
    generator = torch.Generator().manual_seed(seed)
    between = seed % 5  # earlier tokens of the second reading
    tokens, dim = first + between + length, 8
    query = 2 * torch.randn(2, heads * groups, length, dim, generator=generator)
    key, value = (torch.randn(2, heads, tokens, dim, generator=generator) for _ in range(2))
    real = torch.ones(2, tokens, dtype=torch.bool)
    real[1, : seed % first], real[1, tokens - seed % length :] = False, False
    near = seed % 7
    options = {"skipped": skipped, "near": near, "real": real[:, None]}
    out, found = attention_and_importance(query, key, value, 0.3, first, **options)
    for row in range(2):
        for head in range(heads * groups):
            scores = 0.3 * query[row, head].double() @ key[row, head // groups].double().mT
            hidden = torch.ones(length, tokens, dtype=torch.bool).triu(tokens - length + 1) | ~real[row]
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            asks = real[row, tokens - length :]
            right = (weights @ value[row, head // groups].double())[asks].float()
            torch.testing.assert_close(out[row, head][asks], right, rtol=1e-4, atol=1e-5)
            behind = torch.arange(tokens - length, tokens)[:, None] - torch.arange(tokens)
            squares = weights.square().masked_fill(behind < near, 0)[skipped:][asks[skipped:]]
            found[row, head // groups] -= squares.sum(0)[:first].float()
    assert found.abs().max() <= 1e-4 * length
    alone = attention_and_importance(query[:1], key[:1], value[:1], 0.3, first)
    torch.testing.assert_close(alone[0], out[:1])


def test_a_long_piece_is_computed_some_rows_at_a_time():
    """In bfloat16 and for so many tokens that rows are few; each row as in one block of all."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 300, 16, generator=generator)
    key, value = (torch.randn(1, 2, 2500, 16, generator=generator) for _ in range(2))
    out, paid = attention_and_importance(query, key, value, 0.25, 2000)
    halves = [
        attention_and_importance(query[:, :, part], key[:, :, :end], value[:, :, :end], 0.25, 2000)
        for part, end in ((slice(150), 2350), (slice(150, 300), 2500))
    ]
    torch.testing.assert_close(out, torch.cat([x for x, _ in halves], 2))
    torch.testing.assert_close(paid, sum(x for _, x in halves))
    low = attention_and_importance(*(x.bfloat16() for x in (query, key, value)), 0.25, 2000)
    torch.testing.assert_close(low[0].float(), out, rtol=0.02, atol=0.02)
    torch.testing.assert_close(low[1], paid, rtol=0.05, atol=1e-5)
