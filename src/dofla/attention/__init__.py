"""The arithmetic of attention: compressed caches, and linear attention through features. Knows nothing of transformers.

Symbols used throughout: B batch, H query heads, Hkv key-value heads (H a multiple of Hkv), L tokens, M features,
d head size of queries and keys, dv head size of values.

A compressed cache holds the newest tokens and the first ones in int8, and others in a few bits, which are evicted by
score: :mod:`dofla.attention.naive_cache` is that in two hundred lines. With features, a pair (query i, key j) has the
log-weight

    log K̂(i, j) = logsumexp_m( a[i, m] + b[j, m] ) + log weight[j]

and attention is the average of the values under those weights, normalized over the visible keys.
"""

from dofla.attention.affine import Affine
from dofla.attention.attend import HybridState, attend, packed, unpacked
from dofla.attention.call import Call
from dofla.attention.chunked import chunked, recurrent
from dofla.attention.coding import CodedTokens, Coder, KeySmoothing, Moments, Tier, tier_bytes
from dofla.attention.compressed import CompressedHeads
from dofla.attention.constants import LOG_ZERO
from dofla.attention.eight_bits import PackedTokens, rounded
from dofla.attention.group import HeadGroup
from dofla.attention.importance import attention_and_importance
from dofla.attention.kernel import exact_scores, log_kernel
from dofla.attention.layout import CompressedState, HeadSizes, Layout
from dofla.attention.naive import naive_attention
from dofla.attention.state import FeatureState, TokenBuffer, accumulable, log_weights

__all__ = [
    "LOG_ZERO",
    "Affine",
    "Call",
    "CodedTokens",
    "Coder",
    "CompressedHeads",
    "CompressedState",
    "FeatureState",
    "HeadGroup",
    "HeadSizes",
    "HybridState",
    "KeySmoothing",
    "Layout",
    "Moments",
    "PackedTokens",
    "Tier",
    "TokenBuffer",
    "accumulable",
    "attend",
    "attention_and_importance",
    "chunked",
    "exact_scores",
    "log_kernel",
    "log_weights",
    "naive_attention",
    "packed",
    "recurrent",
    "rounded",
    "tier_bytes",
    "unpacked",
]
