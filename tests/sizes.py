"""Compressed caches of so many tokens per KV head."""

import pytest

import dofla
from dofla.attention import compiled
from dofla.compression.plan import bytes_for
from dofla.compression.target import Target
from dofla.integration.wrapped import unwrapped

FAMILIES = ["gpt2", "llama", *(pytest.param(family, marks=pytest.mark.slow) for family in ("gpt_neox", "opt"))]
"""Of :data:`tiny_families.CAUSAL`, with learned positions and with rotary ones, and more of both."""

needs_kernels = pytest.mark.skipif(compiled.obstacle() is not None, reason=str(compiled.obstacle()))


def size_of(model, tokens, keep_softmax=()):
    """Bytes of a cache of so many tokens in each KV head."""
    sites = Target.of(unwrapped(model), keep_softmax=keep_softmax).compressed
    return sum(site.kv_heads * bytes_for(tokens, site.head_dim, site.value_dim) for site in sites)


def compress(model, windows, tokens=48, **options):
    """:func:`dofla.compress` to so many tokens per KV head."""
    return dofla.compress(model, windows, size_of(model, tokens, options.get("keep_softmax", ())), **options)
