"""Tensors side by side in rows of bytes: nothing is lost, and what is done to rows is done to all of them."""

import math
from dataclasses import fields

import pytest
import torch
from compressed_heads import HEADS
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.attention import CompressedHeads, Layout, tier_bytes
from dofla.attention.compiled import build
from dofla.attention.constants import ALIGNMENT, FREE, LOG_ZERO
from dofla.attention.layout import HEAD_NUMBERS, PARTS, Contents, Group, capacity, layout_header
from dofla.attention.rows import Rows

SLOTS = 20
"""Of tiers that grow."""
DTYPES = [torch.uint8, torch.int8, torch.int16, torch.float32, torch.float64]
PARTS_OF_ROWS = st.lists(
    st.tuples(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.sampled_from(DTYPES)), min_size=1
)


def numbers(seed, parts, *batch):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 127, (*batch, *shape), generator=generator).to(dtype) for shape, dtype in parts]


def same(some, others):
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(some, others, strict=True))


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), parts=PARTS_OF_ROWS, batch=st.sampled_from([(), (1,), (3,)]))
def test_parts_come_back_from_rows_as_they_were(seed, parts, batch):
    rows, given_in = Rows(parts), numbers(seed, parts, *batch)
    joined = rows.joined(given_in)
    assert joined.shape == (*batch, rows.bytes)
    assert joined.dtype == torch.uint8
    assert same(rows.cut(joined), given_in)
    least = sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)
    assert least <= rows.bytes < least + ALIGNMENT * len(parts)
    assert all((part.data_ptr() - joined.data_ptr()) % ALIGNMENT == 0 for part in rows.cut(joined))


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), parts=PARTS_OF_ROWS)
def test_what_is_done_to_rows_is_done_to_all_parts(seed, parts):
    rows, given_in, order = Rows(parts), numbers(seed, parts, 4), torch.tensor([2, 0, 0])
    joined = rows.joined(given_in)
    assert same(rows.cut(joined[order]), [part[order] for part in given_in])
    assert same(rows.cut(joined[1:3]), [part[1:3] for part in given_in])
    rows.part(joined, 0).zero_()
    assert not rows.part(joined, 0).any()
    assert same(rows.cut(joined)[1:], given_in[1:])


def layout_of(shape):
    return Layout(shape["sizes"], shape["head_dim"], shape["value_dim"], shape["bits"], SLOTS)


def tensors(contents: list[Contents]) -> list[torch.Tensor]:
    kinds = [getattr(own, kind.name) for own in contents for kind in fields(Contents)]
    return [part for kind in kinds if kind is not None for part in vars(kind).values()]


@settings(max_examples=60)
@given(shape=HEADS)
def test_tokens_come_back_from_a_state_as_they_were(shape):
    layout = layout_of(shape)
    state = layout.empty(3, torch.device("cpu"))
    contents = layout.open(state)
    for n, part in enumerate(tensors(contents)):  # views: what is written there, is written into the row
        part.copy_(torch.arange(part.numel()).view_as(part) % 100 + n)
    given_in = [part.clone() for part in tensors(contents)]
    assert state.rows.shape == (3, layout.bytes)
    assert same(tensors(layout.open(state)), given_in)  # no part overlaps another
    closed = layout.close(contents)
    assert same(tensors(layout.open(closed)), given_in)
    assert closed.rows.data_ptr() != state.rows.data_ptr()
    order = torch.tensor([2, 2, 1])
    assert same(tensors(layout.open(closed.reorder(order))), [part[order] for part in given_in])
    assert all((part.data_ptr() - closed.rows.data_ptr()) % ALIGNMENT == 0 for part in tensors(layout.open(closed)))


@settings(max_examples=60)
@given(shape=HEADS)
def test_every_sequence_begins_with_nothing(shape):
    layout = layout_of(shape)
    alone, three = (layout.empty(batch, torch.device("cpu")) for batch in (1, 3))
    assert torch.equal(three.rows, alone.rows.expand(3, -1))
    for own in layout.open(three):
        for tokens in (own.window, own.sinks, own.tier):
            assert tokens is None or (tokens.log_weight == LOG_ZERO).all()
        assert (own.tier.score == FREE).all()
    assert torch.equal(layout.close(layout.open(three)).rows, three.rows)


@settings(max_examples=60)
@given(shape=HEADS)
def test_a_row_takes_the_bytes_of_its_tokens(shape):
    """A byte per number of a token in int8, and two exponents; in the tier, its bits, scales and a score."""
    layout, dims = layout_of(shape), (shape["head_dim"], shape["value_dim"])
    of_tokens = sum(
        (size.window + size.sinks) * (sum(dims) + 2)
        + (SLOTS if size.grows else size.newest + size.heavy_hitters) * tier_bytes(*dims, shape["bits"])
        for size in shape["sizes"]
    )
    shared = sum(4 * (size.window + size.sinks) for size in layout.sizes)  # log-weights
    padding = layout.bytes - of_tokens - shared
    assert 0 <= padding < ALIGNMENT * len(PARTS) * len(layout.groups)
    layouts = CompressedHeads(shape["sizes"], *dims, shape["bits"]).layouts
    assert layouts.grow == any(size.grows for size in shape["sizes"])
    for tokens in (0, 64, 65, 5000):
        found = layouts.with_room(tokens)
        assert layouts.with_room(tokens) is layouts.of(found.bytes) is found
    assert (layouts.first is found) == (not layouts.grow)
    with pytest.raises(ValueError, match="no state of this layer"):
        layouts.of(found.bytes + 1)


@given(tokens=st.integers(1, 10**6))
def test_capacity_is_little_more_than_the_tokens_and_seldom_changes(tokens):
    slots = capacity(tokens)
    assert tokens <= slots <= max(1.25 * tokens, tokens + 63)
    assert capacity(slots) == slots
    assert len({capacity(tokens + n) for n in range(60)}) <= 2


@settings(max_examples=60)
@given(shape=HEADS)
def test_numbers_of_a_head_say_where_its_tokens_begin(shape):
    layout = layout_of(shape)
    state = layout.empty(1, torch.device("cpu"))
    found = [dict(zip(HEAD_NUMBERS, own, strict=True)) for own in layout.head_numbers()]
    assert sorted(own["head"] for own in found) == list(range(len(shape["sizes"])))
    for contents, heads in zip(layout.open(state), layout.heads, strict=True):
        for place, head in enumerate(heads):
            own = next(x for x in found if x["head"] == head)
            assert own["slots"] == len(contents.tier)
            assert own["first"] == (place == 0)
            for name, tokens, field in (("window_key", "window", "key"), ("tier_score", "tier", "score")):
                part = getattr(getattr(contents, tokens), field)[:, place]
                assert own[name] == part.data_ptr() - state.rows.data_ptr()


def test_the_kernels_read_the_groups_of_python(tmp_path):
    build.write_headers(tmp_path)
    header = (tmp_path / "layout.h").read_text(encoding="utf-8")
    assert header == layout_header()
    declared = header.split("std::int64_t ")[1].split(";")[0].split(", ")
    assert declared == [*Group._fields[:-1], *PARTS]
    assert f"kGroupNumbers = {len(declared)};" in header
