"""One sentence on whether to use a student, and the rule it follows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dofla.display import size

GAPS = (0.1, 0.3)
"""Upper end of the loss increase in nats per token up to which a student is close to its original, and up to which it
serves where memory decides: perplexity 11 % and 35 % higher."""

LIKENESS = (0.98, 0.9)
"""The same for an encoder: the smaller of the cosine of embeddings and the rank correlation of similarities."""

RULE = (
    "A language model is close to its original if the upper end of the loss increase's interval is at most "
    f"{GAPS[0]} nats per token, and of use where memory decides up to {GAPS[1]}; an encoder, if cosine and rank "
    f"correlation are at least {LIKENESS[0]} and {LIKENESS[1]}. It must also gain something at a length that the model "
    "can read: a cache smaller than the original's or, of an encoder, shorter reading. Facts are called lost from the "
    "distance on at which the student finds less than half of what the original finds, both beyond guessing."
)


@dataclass(frozen=True)
class Figures:
    """What the verdict is made from.

    Attributes:
        worst: upper end of the loss increase in nats per token; of an encoder, the smaller of cosine and rank
            correlation.
        mean: the loss increase itself; plays no part for an encoder.
        state_bytes: per sequence.
        token_bytes: by which the original's cache grows per token, beyond what kept layers keep in both.
        longest: tokens that the model can read, None if there is no end; of an encoder, that it was timed with.
        faster_from: context from which the student takes less time (of a language model, to write a token); None if it
            never does or was not timed, as ``timed`` says.
        forgets_from: tokens from which on it recalls less than half of what the original does; None if it was not
            found to, or not asked.
        learns: whether it has features, which training layer by layer would make better.
    """

    language: bool
    worst: float
    mean: float
    state_bytes: int
    token_bytes: int
    longest: int | None
    faster_from: float | None
    timed: bool
    forgets_from: int | None
    learns: bool

    @property
    def smaller_from(self) -> int | None:
        """The first length at which the original's cache is larger than the state."""
        return self.state_bytes // self.token_bytes + 1 if self.token_bytes else None


def verdict(figures: Figures) -> dict[str, Any]:
    """``level`` (use, care, no) and ``sentence``, by :data:`RULE`."""
    return _language(figures) if figures.language else _encoder(figures)


def _language(x: Figures) -> dict[str, Any]:
    loss = f"{x.mean:.3f} nats per token"
    if not x.worst <= GAPS[1]:
        more = "strategy measured, longer training" if x.learns else "features to train (strategy measured)"
        times = f"{math.exp(x.mean):,.1f}" if x.mean < 20 else "many"
        return _say(
            "no",
            f"Do not use it: it loses {loss} (perplexity × {times}); give it more bytes, {more}, "
            "or training end to end.",
        )
    start = x.smaller_from
    if start is None or (x.longest is not None and start > x.longest):
        where = (
            "of any text" if x.longest is None else f"of the longest text that the model can read, {x.longest:,} tokens"
        )
        return _say(
            "no", f"Do not use it: its {size(x.state_bytes)} of state are no less than the original's cache {where}."
        )
    gain = f"it keeps {size(x.state_bytes)} where the original's cache goes on growing"
    if x.faster_from is not None:
        gain += f", and writes faster from {_round(x.faster_from)} tokens on"
    elif x.timed:
        gain += ", though it is no faster at writing on this machine"
    but = ""
    if x.forgets_from is not None:
        but = f", but not to look up facts told {x.forgets_from:,} or more tokens before"
    if x.worst <= GAPS[0]:
        return _say("use", f"Use it for texts beyond {_round(start)} tokens{but}: it loses {loss}, {gain}.")
    return _say(
        "care", f"Use it only where memory decides, beyond {_round(start)} tokens{but}: it loses {loss}; {gain}."
    )


def _encoder(x: Figures) -> dict[str, Any]:
    close = f"its embeddings agree with the original's by {x.worst:.3f}"
    if not x.worst >= LIKENESS[1]:
        return _say("no", f"Do not use it: {close} only; give it more bytes, a window, or longer training.")
    if not x.timed:
        return _say("care", f"Its quality would serve, as {close}; whether it is faster was not measured.")
    if x.faster_from is None:
        return _say("no", f"There is no reason to use it: {close}, but up to {x.longest:,} tokens it is not faster.")
    where = f"for texts beyond {_round(x.faster_from)} tokens, which it reads faster"
    if x.worst >= LIKENESS[0]:
        return _say("use", f"Use it {where}: {close}.")
    return _say("care", f"Use it with care {where}: {close}, which changes some rankings.")


def _say(level: str, sentence: str) -> dict[str, Any]:
    return {"level": level, "sentence": sentence}


def _round(tokens: float) -> str:
    """Two digits are all that these lengths are worth."""
    digits = 10 ** max(0, math.floor(math.log10(max(tokens, 1))) - 1)
    return f"{round(tokens / digits) * digits:,}"
