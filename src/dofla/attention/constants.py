"""Numbers that plain torch, the C++ kernels and the Triton kernels have in common, so that their codes and scores agree
bit for bit. C++ reads them as ``constants.h``, which :mod:`dofla.attention.compiled.build` writes from this module."""

LOG_ZERO = -(2.0**100)
"""Log of the weight of a key nobody sees. Finite and a power of two, so that differences of two of them, in whatever
precision, are 0 and not NaN; far enough down that adding any log-feature to it changes nothing, and that exp of its
distance to any real weight is exactly 0."""
SMALLEST_TRUSTED_MASS = 1e-28
"""Sums of exponentials, of 1 at most, below this are computed again, token by token; above it, what underflowed
is below 1e-6 of them."""

ALIGNMENT = 16
"""Bytes to whose multiples each part of a row of bytes begins: any type can be read there, and no vector that the
kernels load straddles two lines of the processor's cache."""

MOST_BITS = 5
"""Bits of a coded number at most."""
WINDOW = 6
"""Bits of a trellis code that say which level a number stands for: its own and those of the numbers before it."""
UNIT = 45
"""Levels are integers of a signed byte, this many to a standard deviation."""
FINE = 4
"""Numbers to be coded are given in whole parts of a level's unit, this many to one."""
BRANCHES = 32
"""Costs of paths through the trellis are multiples of this: which way a path came stands below."""
NOWHERE = 2**29
"""Cost of a state in which no path is; no path costs as much."""

OCTAVE = 8
"""Steps of the logarithm of an attention weight to a factor of two."""
LEAST_STEPS = 13 * OCTAVE
"""Weights so many steps below the largest count as nothing."""
MOST_STEPS = 2.0**30
"""Logarithms of weights are clamped to this many steps."""
GAIN = 2.0**12
"""Increase of the score of a token that gets all attention of a query."""
DECAY = 256
"""A score loses this fraction, one over it, with every token."""
LATELY_WEIGHT = 4.0
"""Attention of the last queries of a prompt beside importance, which is of a whole second reading
(docs/research/cache.md)."""
MOST_SCORE = 2**15 - 1
FREE = -1
"""Score of a free slot or of padding, which leave before any token."""
NEVER = 2**30
"""Number of the query that sees a token no more, if there is none: no call has so many."""
