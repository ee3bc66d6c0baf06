"""One sentence on how close a model is to its original, and the rule it follows."""

import math
from collections.abc import Sequence

from dofla.display import figure, percent

LOSSES = (0.1, 0.3)
"""Upper end of the interval of the loss increase, in nats per token, up to which a model is close to its original, and
up to which it is of use where memory decides: perplexity 11 % and 35 % higher."""

LIKENESS = (0.98, 0.9)
"""The same for an encoder: the smaller of the cosine of embeddings and the rank correlation of similarities."""

_WORDS = {"close": "Close to the original", "worse": "Worse than the original", "far": "Far from the original"}
_BETTER = (
    "The compressed model predicts this text better than the original: the text is unlike the original's training "
    "text. Compare the KL divergence."
)


def worst_of(increase: float, interval: Sequence[float] | None) -> float:
    """The upper end of the interval of a loss increase, or the increase itself where too few windows have none."""
    return increase if interval is None else interval[1]


def level(worst: float, limits: tuple[float, float] = LOSSES) -> str:
    """``close``, ``worse`` or ``far``, by what :func:`worst_of` says; or, with :data:`LIKENESS`, by the smaller of the
    cosine and the rank correlation of embeddings. NaN is ``far``."""
    close, usable = (worst >= limit if limits == LIKENESS else worst <= limit for limit in limits)
    return "close" if close else "worse" if usable else "far"


def verdict(increase: float, interval: Sequence[float] | None, smaller: str, length: int) -> str:
    """One sentence on an increase of the loss in nats per token, with its interval, beside the memory it saves:
    ``smaller`` says how the caches compare at ``length`` tokens. A second one, where too few windows were read for an
    interval."""
    if interval is not None and interval[1] < 0:
        return _BETTER
    words = _WORDS[level(worst_of(increase, interval))]
    unsure = " So few windows have no 95 % interval: give more." if interval is None else ""
    return f"{words}: perplexity {perplexity(increase)}, cache {smaller} at {length:,} tokens.{unsure}"


def embedding_words(likeness: float) -> str:
    """One sentence on ``likeness``, the smaller of the cosine and the rank correlation of embeddings."""
    return f"{_WORDS[level(likeness, LIKENESS)]}: its embeddings agree by {figure(likeness)}."


def perplexity(increase: float) -> str:
    """The increase of the perplexity that goes with one of the loss: ``+0.332 %``; ``x 212`` from twice it on."""
    if increase < math.log(2):
        return percent(math.expm1(increase))
    return f"x {figure(math.exp(increase))}" if increase < 20 else "x 10^8 or more"
