"""Tensors side by side in rows of bytes: nothing is lost, and what is done to rows is done to all of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.attention import LOG_ZERO, CodedTiers, Layout, ScoredTokens
from dofla.attention.constants import ALIGNMENT
from dofla.attention.rows import Rows

DTYPES = [torch.uint8, torch.int8, torch.int16, torch.float32, torch.float64]
PARTS = st.lists(st.tuples(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.sampled_from(DTYPES)), min_size=1)


def numbers(seed, parts, *batch):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 127, (*batch, *shape), generator=generator).to(dtype) for shape, dtype in parts]


def same(some, others):
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(some, others, strict=True))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), parts=PARTS, batch=st.sampled_from([(), (1,), (3,)]))
def test_parts_come_back_from_rows_as_they_were(seed, parts, batch):
    rows, given_in = Rows(parts), numbers(seed, parts, *batch)
    joined = rows.joined(given_in)
    assert joined.shape == (*batch, rows.bytes)
    assert joined.dtype == torch.uint8
    assert same(rows.cut(joined), given_in)
    least = sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)
    assert least <= rows.bytes < least + ALIGNMENT * len(parts)
    assert all((part.data_ptr() - joined.data_ptr()) % ALIGNMENT == 0 for part in rows.cut(joined))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), parts=PARTS)
def test_what_is_done_to_rows_is_done_to_all_parts(seed, parts):
    rows, given_in, order = Rows(parts), numbers(seed, parts, 4), torch.tensor([2, 0, 0])
    joined = rows.joined(given_in)
    assert same(rows.cut(joined[order]), [part[order] for part in given_in])
    assert same(rows.cut(joined[1:3]), [part[1:3] for part in given_in])
    rows.part(joined, 0).zero_()
    assert not rows.part(joined, 0).any()
    assert same(rows.cut(joined)[1:], given_in[1:])


@pytest.mark.parametrize(("window", "sinks", "heavy_hitters"), [(5, 2, 0), (5, 0, 3), (0, 2, 3)])
def test_a_state_in_one_piece_is_the_state(window, sinks, heavy_hitters):
    coded_tiers = CodedTiers(2, 16, 24, [(3, 4.0), (4, 2.5)], heavy_hitters)
    coded_tiers.reset()
    layout = Layout(coded_tiers, [0, 2], 6, window, sinks)
    state = layout.opened(layout.empty(3, torch.device("cpu")))
    for n, tokens in enumerate((state.window, state.sinks, *state.tiers)):
        for part in () if tokens is None else vars(tokens).values():
            part.copy_(torch.arange(part.numel()).view_as(part) % 100 + n)
    flat = layout.flat(state)
    opened = layout.opened(flat)
    assert layout.sizes == [2, 0, 2, window, sinks, heavy_hitters, 1, 2, 3, 4]
    assert flat.tokens.shape == (3, layout.bytes)
    assert opened.features is state.features
    assert (opened.window is None, opened.sinks is None) == (window == 0, sinks == 0)
    assert isinstance(opened.tiers[-1], ScoredTokens) == (heavy_hitters > 0)
    for ours, theirs in zip(
        (opened.window, opened.sinks, *opened.tiers), (state.window, state.sinks, *state.tiers), strict=True
    ):
        assert ours is theirs is None or same(vars(ours).values(), vars(theirs).values())
    again = layout.flat(layout.opened(flat.reorder(torch.tensor([2, 2, 1]))))
    assert torch.equal(again.tokens, flat.tokens[[2, 2, 1]])


@pytest.mark.parametrize("heavy_hitters", [0, 3])
def test_every_sequence_begins_with_nothing(heavy_hitters):
    coded_tiers = CodedTiers(2, 16, 24, [(3, 4.0), (4, 2.5)], heavy_hitters)
    coded_tiers.reset()
    layout = Layout(coded_tiers, [0, 1], 6, 5, 2)
    alone, three = (layout.empty(batch, torch.device("cpu")) for batch in (1, 3))
    assert torch.equal(three.tokens, alone.tokens.expand(3, -1))
    opened = layout.opened(three)
    for tokens in (opened.window, opened.sinks, *opened.tiers):
        assert (tokens.log_weight == LOG_ZERO).all()
