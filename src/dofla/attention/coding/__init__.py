"""Tokens in few bits: vectors rotated to the directions that matter, in blocks with a scale and bits of their own.

A key or a value loses the mean of its head, is rotated so that its variance falls from block to block in the measure in
which errors count (for keys, what queries make of them; for values, what the output projection does), and is rotated
within each block, which makes its numbers close to normal. Each block then is a scale of one byte and a few bits a
number.

Coding is exact arithmetic: products of integers whose sums float32 holds, and single correctly rounded operations.
So the code of a token is a function of the token alone, whatever it is computed beside, and a state read in one call is
that of the same tokens read one by one, bit for bit.
"""

from dofla.attention.coding.coder import Coder, Moments
from dofla.attention.coding.smoothing import KeySmoothing
from dofla.attention.coding.tier import Tier, tier_bytes
from dofla.attention.coding.tokens import CodedTokens

__all__ = ["CodedTokens", "Coder", "KeySmoothing", "Moments", "Tier", "tier_bytes"]
