"""The arithmetic for a CPU without gradients, as C++ kernels.

Of compressed caches (compressed.cpp): trellis.h is coding/trellis.py, coding.h and, for many tokens at once, together.h
are the rest of coding/ and eight_bits.py, heavy_hitters.h is coding/heavy_hitters.py; decoding.h reads one token of
every sequence, prefill.h (with lines.h and reading.h) many, one after the other. Of exact prompts causal.h is their
attention, retaining.h what prefill.py retains of them; codes.cpp codes and decodes tokens alone. Of features
(attention.cpp): features.h is chunked.py, exact.h is exact.py.

They keep each chunk in the processor's cache. Small matrix products are torch's own (oneDNN) on x86-64, those of
product.h elsewhere. tensor.h is what they take of torch, its stable ABI: one library serves any torch from 2.10 on, and
a wheel brings libraries along (prebuilt.py). Where the kernels cannot be built or do not run, :func:`obstacle` says
why, and plain torch does the same work.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from dofla.attention.affine import Affine
from dofla.attention.exact import ExactPart
from dofla.attention.state import FeatureState, TokenBuffer

SWITCH = "DOFLA_KERNELS"
"""Environment variable; 0 means plain torch."""


@lru_cache(maxsize=1)
def obstacle() -> str | None:
    """Why the kernels cannot be used on this machine, or None. The first call compiles them."""
    from dofla.attention.compiled.build import load

    return load()


def usable(
    vectors: Sequence[Tensor], others: Sequence[Tensor], dtypes: Sequence[torch.dtype] = (torch.float32,)
) -> bool:
    """True if the kernels take these: on a CPU, no derivative asked for, vectors of ``dtypes`` with contiguous rows."""
    differentiable, traced = torch.is_grad_enabled(), torch.compiler.is_compiling()
    for t in (*vectors, *others):  # without generators, as this is asked for every token
        if not t.is_cpu or (differentiable and t.requires_grad):
            return False
        if not traced and unpack_dual(t).tangent is not None:  # forward-mode derivatives
            return False
    for t in vectors:
        if t.dtype not in dtypes or t.stride(-1) != 1:
            return False
    return bool(torch.backends.mkldnn.enabled) and _obstacle() is None


@torch.compiler.assume_constant_result
def _obstacle() -> str | None:
    return obstacle()


def linear_attention(
    query: Tensor,
    tokens: TokenBuffer,
    state: FeatureState,
    maps: tuple[Affine, Affine] | None = None,
    exact: ExactPart | None = None,
) -> tuple[Tensor, Tensor, FeatureState]:
    """:func:`dofla.attention.chunked`, causal, of vectors with the maps of queries and of keys, or of log-features
    without; and attention to an exact part. Returns output [B, H, L, dv], the log-normalizer [B, H, L] of the features
    alone, and the state after the last token."""
    tensors = [t.contiguous() for m in maps or () for t in (m.weight, m.bias)]
    numbers = [x for m in maps or () for x in (m.scale, m.curvature)]
    others, window, scaling = [], 0, 1.0
    if exact is not None:
        near, sinks, window, scaling = exact.near, exact.sinks, exact.window, exact.scaling
        others = [exact.query, near.key, near.value, near.log_weight]
        others += [t.contiguous() for t in (sinks.key, sinks.value, sinks.log_weight, exact.visible_from)]
    inputs = query, tokens.key, tokens.value, tokens.log_weight, state.mean, state.log_mass, tensors, numbers
    out, normalizer, *after = torch.ops.dofla.linear_attention(*inputs, others, window, scaling)
    return out, normalizer, FeatureState(*after)
