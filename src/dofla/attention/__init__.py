"""The arithmetic of linear attention. Knows log-features, values and states; knows nothing of transformers.

Symbols used throughout: B batch, H query heads, Hkv key-value heads (H a multiple of Hkv), L tokens, M features,
d head size of queries and keys, dv head size of values. A pair (query i, key j) has the log-weight

    log K̂(i, j) = logsumexp_m( a[i, m] + b[j, m] ) + log weight[j]

and attention is the average of the values under those weights, normalized over the visible keys.
"""

from dofla.attention.affine import Affine
from dofla.attention.attend import attend
from dofla.attention.carried import State, packed, unpacked
from dofla.attention.chunked import chunked
from dofla.attention.coding import CodedTiers, CodedTokens, Coder, KeySmoothing, Moments, ScoredTokens, Tier, tier_bytes
from dofla.attention.compressed import CompressedHeads
from dofla.attention.constants import LOG_ZERO
from dofla.attention.eight_bits import PackedTokens, rounded
from dofla.attention.flat import Carried, FlatState, Layout
from dofla.attention.kernel import exact_scores, log_kernel
from dofla.attention.naive import naive_attention
from dofla.attention.prefill import exact_prefill
from dofla.attention.recurrent import recurrent
from dofla.attention.state import FeatureState, TokenBuffer, accumulable, side_by_side

__all__ = [
    "LOG_ZERO",
    "Affine",
    "Carried",
    "CodedTiers",
    "CodedTokens",
    "Coder",
    "CompressedHeads",
    "FeatureState",
    "FlatState",
    "KeySmoothing",
    "Layout",
    "Moments",
    "PackedTokens",
    "ScoredTokens",
    "State",
    "Tier",
    "TokenBuffer",
    "accumulable",
    "attend",
    "chunked",
    "exact_prefill",
    "exact_scores",
    "log_kernel",
    "naive_attention",
    "packed",
    "recurrent",
    "rounded",
    "side_by_side",
    "tier_bytes",
    "unpacked",
]
