"""The numbers that describe a KV head (:data:`dofla.attention.layout.HEAD_NUMBERS`), as kernels read them.

Importing this file needs triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dofla.attention.layout import HEAD_NUMBERS


def _index(name: str) -> tl.constexpr:
    return tl.constexpr(HEAD_NUMBERS.index(name))


WINDOW_KEY, WINDOW_KEY_EXPONENT = _index("window_key"), _index("window_key_exponent")
WINDOW_VALUE, WINDOW_VALUE_EXPONENT = _index("window_value"), _index("window_value_exponent")
WINDOW_LOG_WEIGHT = _index("window_log_weight")
SINK_KEY, SINK_KEY_EXPONENT = _index("sink_key"), _index("sink_key_exponent")
SINK_VALUE, SINK_VALUE_EXPONENT = _index("sink_value"), _index("sink_value_exponent")
SINK_LOG_WEIGHT = _index("sink_log_weight")
TIER_KEY, TIER_KEY_SCALE = _index("tier_key"), _index("tier_key_scale")
TIER_VALUE, TIER_VALUE_SCALE = _index("tier_value"), _index("tier_value_scale")
TIER_SCORE = _index("tier_score")
SLOTS, HEAD, FIRST = _index("slots"), _index("head"), _index("first")
_COUNT = tl.constexpr(len(HEAD_NUMBERS))


@triton.jit
def described(heads, head):
    """The numbers of a head."""
    return heads + head * _COUNT


@triton.jit
def number(own, NAME: tl.constexpr):
    """One of the numbers of a head."""
    return tl.load(own + NAME).to(tl.int64)
