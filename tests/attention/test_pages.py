"""States as pages of a pool, as a server holds them: what is computed is what states of their own give, bit for bit."""

from itertools import accumulate

import pytest
import torch
from compressed_heads import HEADS, SCALING, SIZE, heads_of, vectors
from forms import needs_kernels
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.attention import Call, compiled
from dofla.layers import AttentionLayer, read_pages
from dofla.layers.pages import batches

PAGES, GAP, LENGTHS = 7, 16, st.sampled_from([1, 1, 1, 2, 9, 20])
"""Pages of a pool, the bytes between them, and tokens that a sequence reads at once."""
CALLS = st.lists(st.dictionaries(st.integers(0, 3), LENGTHS, min_size=1), min_size=1, max_size=6)
"""Which sequences read in a call, and how many tokens each."""


def layer_of(**shape):
    return AttentionLayer([heads_of(0, **shape)])


def inputs_of(layer, seed, *shape):
    return vectors(seed, layer.compressed, *shape)


def tokens_of(inputs):
    """Vectors [1, heads, L, d] as [L, heads, 1, d]."""
    return [x.transpose(0, 2) for x in inputs]


def pool_of(layer):
    """A pool whose pages have other bytes around them, and all of it."""
    size = layer.compressed.layout.bytes
    whole = torch.randint(0, 256, (PAGES, size + GAP), dtype=torch.uint8)
    return whole[:, :size], whole


def check(layer, calls, groups, exact=False, important=False):
    """Sequences that read pieces of texts in turns, some together, by pages and each by states of its own."""
    pool, whole = pool_of(layer)
    pages, begun = torch.randperm(PAGES)[:4], {}
    free = [page for page in range(PAGES) if page not in pages]
    untouched = whole[free].clone(), whole[:, -GAP:].clone()
    for number, call in enumerate(calls):
        call = dict(sorted(call.items(), key=lambda item: item[1] > 1))  # those that read one token stand first
        starts, out = [0, *accumulate(call.values())], []
        inputs = inputs_of(layer, number, 1, groups, starts[-1])
        importance = torch.rand(1, layer.kv_heads, starts[-1]) if important else None
        begin = {place for place, n in enumerate(call) if n not in begun}
        for (n, length), start in zip(call.items(), starts, strict=False):
            if n not in begun:
                begun[n] = layer.compressed.layout.empty(1, torch.device("cpu"))
                pool[pages[n]] = begun[n].rows[0]
            own, tokens = [x[:, :, start : start + length] for x in inputs], slice(start, start + length)
            states = None if length > 1 and list(call).index(n) in begin else [begun[n]]
            options = {"exact": exact, "importance": None if importance is None else importance[:, :, tokens]}
            found, (begun[n],) = layer(*own, scaling=SCALING, states=states, **options)
            out.append(found)
        own = Call(*tokens_of(inputs), SCALING, exact=exact)
        if important:
            own = own._replace(importance=importance.permute(2, 1, 0))
        found = read_pages(layer, own, pool, pages[list(call)], starts, begin)
        assert torch.equal(found.transpose(0, 2), torch.cat(out, 2))
        assert all(torch.equal(pool[pages[n]], begun[n].rows[0]) for n in call)
    assert torch.equal(whole[free], untouched[0])
    assert torch.equal(whole[:, -GAP:], untouched[1])


@needs_kernels
@settings(max_examples=40)
@given(shape=HEADS, calls=CALLS, groups=st.sampled_from([1, 3]))
def test_pages_are_read_and_written_by_the_kernels(shape, calls, groups):
    check(layer_of(**shape), calls, groups)


@needs_kernels
def test_a_token_may_stand_behind_a_longer_part():
    layer = layer_of()
    inputs, pages = inputs_of(layer, 0, 1, 2, 7), torch.tensor([4, 2])
    found = []
    for starts, order in (([0, 6, 7], [0, 1, 2, 3, 4, 5, 6]), ([0, 1, 7], [6, 0, 1, 2, 3, 4, 5])):
        pool, _ = pool_of(layer)
        pool[:] = layer.compressed.layout.empty(1, torch.device("cpu")).rows
        own = Call(*tokens_of([x[:, :, order] for x in inputs]), SCALING)
        out = read_pages(layer, own, pool, pages if starts[1] == 6 else pages.flip(0), starts)
        found.append((out[torch.tensor(order).argsort()], pool[pages]))
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=needs_kernels)])
def test_without_kernels_and_with_exact_prefill(exact, kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr(compiled, "usable", lambda *_: False)
    layer = layer_of(sizes=[SIZE, SIZE._replace(window=3)])
    calls = [{0: 9, 2: 9}, {1: 1}, {2: 1, 1: 1, 0: 1}, {0: 12, 1: 1, 3: 1}]
    check(layer, calls, 2, exact)
    check(layer, [*calls, {1: 1, 0: 80, 3: 80}, {2: 1, 3: 70}], 2, exact, important=True)


@needs_kernels
@pytest.mark.parametrize(
    ("bytes_", "pages", "starts", "words"),
    [
        (8, [1], [0, 1], "no state of this layer has 8 bytes"),
        (None, [1, 2], [0, 1], "a page and a start"),
        (None, [1], [0, 2], "a page and a start"),
    ],
)
def test_what_does_not_fit_together_is_refused(bytes_, pages, starts, words):
    layer = layer_of(sizes=[SIZE])
    inputs, pool = (
        inputs_of(layer, 0, 1, 1, 1),
        torch.zeros(3, bytes_ or layer.compressed.layout.bytes, dtype=torch.uint8),
    )
    with pytest.raises((ValueError, RuntimeError), match=words):
        read_pages(layer, Call(*tokens_of(inputs), SCALING), pool, torch.tensor(pages), starts)


def test_neighbors_with_as_many_tokens_are_a_batch(monkeypatch):
    kinds = [(tokens, False) for tokens in (1, 1, 9, 9, 2)]
    assert batches(kinds, parts=True) == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert batches(kinds, parts=False) == [(0, 2), (2, 4), (4, 5)]
    assert batches([(9, True), (9, False)], parts=False) == [(0, 1), (1, 2)]
    monkeypatch.setattr(compiled, "usable", lambda *_: False)
    layer = layer_of(sizes=[SIZE, SIZE._replace(window=3)])
    inputs, pages, found = tokens_of(inputs_of(layer, 0, 1, 2, 27)), torch.tensor([3, 6, 1, 0]), []
    for parts in (True, False):
        monkeypatch.setattr("dofla.layers.pages.batches", lambda kinds, parts, own=parts: batches(kinds, own))
        pool, _ = pool_of(layer)
        pool[:] = layer.compressed.layout.empty(1, torch.device("cpu")).rows
        for tokens, starts in ((27, [0, 1, 10, 19, 27]), (4, [0, 1, 2, 3, 4])):
            call = Call(*(x[:tokens] for x in inputs), SCALING, exact=True)
            found.append(read_pages(layer, call, pool, pages, starts))
    torch.testing.assert_close(found[:2], found[2:])
