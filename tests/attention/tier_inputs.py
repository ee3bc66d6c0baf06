"""Random queries, keys and values of small heads."""

from __future__ import annotations

import torch

from dofla.attention import rounded

HEAD, VALUE = 16, 24
SCALING = 0.3


def inputs(seed, batch, heads, groups, length):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    query, key = (
        random(batch, heads * groups, length, HEAD),
        random(batch, heads, length, HEAD) + random(heads, 1, HEAD),
    )
    return query, rounded(key), rounded(random(batch, heads, length, VALUE) + random(heads, 1, VALUE))
