"""States as pages of a pool, as a server holds them: what is computed is what states of their own give, bit for bit."""

from __future__ import annotations

import pytest
import torch
from coded_layers import LAYERS, SCALING, TIERS, layer_of, vectors
from forms import needs_kernels
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.attention import FlatState, compiled

PAGES, GAP = 7, 16
"""Pages of a pool, and the bytes between them."""
SEQUENCES = st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True)
CALLS = st.lists(st.tuples(SEQUENCES, st.integers(1, 20)), min_size=1)
"""Which sequences read together, and how many tokens."""


def pools_of(layer):
    """A pool for each group, side by side in pages that have other bytes around them; and all of it."""
    sizes = [layer.layout_of(n).bytes for n in range(len(layer.groups))]
    whole = torch.randint(0, 256, (PAGES, sum(sizes) + GAP), dtype=torch.uint8)
    return list(whole[:, : sum(sizes)].split(sizes, 1)), whole


def check(layer, calls, groups, exact=False):
    """Sequences that read pieces of texts in turns, some together, by pages and by states of their own."""
    pools, whole = pools_of(layer)
    pages, begun = torch.randperm(PAGES)[:4], {}
    layouts = [layer.layout_of(n) for n in range(len(layer.groups))]
    free = [page for page in range(PAGES) if page not in pages]
    untouched = whole[free].clone(), whole[:, -GAP:].clone()
    for number, (sequences, length) in enumerate(calls):
        for n in sequences:
            if n not in begun:
                begun[n] = [layout.empty(1, torch.device("cpu")) for layout in layouts]
                for pool, state in zip(pools, begun[n], strict=True):
                    pool[pages[n]] = state.tokens[0]
        of_groups = zip(*(begun[n] for n in sequences), strict=True)
        states = [FlatState(None, torch.cat([part.tokens for part in parts])) for parts in of_groups]
        inputs = vectors(number, layer, len(sequences), groups, length)
        out, after = layer(*inputs, scaling=SCALING, states=states, exact=exact)
        found = layer.read_pages(*inputs, scaling=SCALING, pools=pools, pages=pages[sequences], exact=exact)
        assert torch.equal(found, out)
        for state, pool in zip(after, pools, strict=True):
            assert torch.equal(pool[pages[sequences]], state.tokens)
        for place, n in enumerate(sequences):
            begun[n] = [FlatState(None, state.tokens[place : place + 1]) for state in after]
    assert torch.equal(whole[free], untouched[0])
    assert torch.equal(whole[:, -GAP:], untouched[1])


@needs_kernels
@settings(max_examples=40, deadline=None)
@given(shape=LAYERS, calls=CALLS, groups=st.sampled_from([1, 3]))
def test_pages_are_read_and_written_by_the_kernels(shape, calls, groups):
    check(layer_of(0, **shape | {"features": 0}), calls, groups)


@pytest.mark.parametrize("exact", [False, True])
def test_without_kernels_and_with_exact_prefill(exact, monkeypatch):
    monkeypatch.setattr(compiled, "usable", lambda *_: False)
    tiers = [((4, 3.0),), ((4, 3.0),)]
    layer = layer_of(0, 16, 24, 5, 2, tiers, 0, 6)
    check(layer, [([0, 2], 9), ([1], 1), ([2, 1, 0], 1), ([0], 12)], 2, exact)


@needs_kernels
def test_a_pool_must_be_the_layers_own():
    layer = layer_of(0, 16, 16, 5, 2, [TIERS[0]], 0, 1)
    inputs, pool = vectors(0, layer, 1, 1, 1), torch.zeros(3, 8, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="another layer"):
        layer.read_pages(*inputs, scaling=SCALING, pools=[pool], pages=torch.tensor([1]))
