"""One sentence on how close a model is to its original and what that saves; it claims what was measured, no more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dofla.display import factor, figure, size
from dofla.evaluation.verdict import LIKENESS, LOSSES, level, likeness_level, perplexity

RULE = (
    "A language model is close to its original if the upper end of the 95 % interval of its loss increase is at most "
    f"{LOSSES[0]} nats per token, and of use where memory decides up to {LOSSES[1]}; an encoder, if cosine and rank "
    f"correlation are at least {LIKENESS[0]} and {LIKENESS[1]}. It must also gain something at a length that the model "
    "can read: a cache smaller than the original's or, of an encoder, shorter reading. Facts are called lost from the "
    "distance on at which it finds less than half of what the original finds, both beyond guessing."
)

_CLOSE = {
    "use": "Close to the original",
    "care": "Worse than the original, of use where memory decides",
    "no": "Far from the original",
}


@dataclass(frozen=True)
class Figures:
    """The figures that the verdict is based on.

    Attributes:
        increase: of the loss, in nats per token; plays no part for an encoder.
        interval: of the increase, 95 %; of an encoder, the smaller of cosine and rank correlation, twice.
        length: of the windows that it was evaluated on, in tokens; plays no part for an encoder.
        state_bytes: per sequence, beyond what layers kept softmax hold in both.
        token_bytes: by which the original's cache grows per token, beyond that too.
        kept_bytes: by which the cache of layers kept softmax grows per token.
        longest: tokens that the model can read, None if there is no end; of an encoder, that it was timed with.
        faster_from: context from which it takes less time (of a language model, to write a token); None if it never
            does or was not timed, as ``timed`` says.
        recall: largest distance, in tokens, at which facts were asked for, and the share that the original and this
            model found, over all distances; None if none were.
        forgets_from: tokens from which on it recalls less than half of what the original does; None if it was not
            found to, or not asked.
        tasks: shares of right answers of the original and of this model; None if no tasks were asked.
    """

    language: bool
    increase: float
    interval: Sequence[float]
    length: int
    state_bytes: int
    token_bytes: int
    kept_bytes: int
    longest: int | None
    faster_from: float | None
    timed: bool
    recall: tuple[int, float, float] | None
    forgets_from: int | None
    tasks: tuple[float, float] | None

    @property
    def smaller_from(self) -> int | None:
        """The first length at which the original's cache is larger than the state."""
        return self.state_bytes // self.token_bytes + 1 if self.token_bytes else None


def verdict(figures: Figures) -> dict[str, Any]:
    """``level`` (use, care, no) and ``sentence``, by :data:`RULE`; ``unchecked``, the names of what nobody measured."""
    return _language(figures) if figures.language else _encoder(figures)


def _language(x: Figures) -> dict[str, Any]:
    kind = level(x.interval[1])
    low, high = map(perplexity, x.interval)
    words = [f"{_CLOSE[kind]}: perplexity {perplexity(x.increase)} (95 % interval {low} to {high}), {_cache(x)}."]
    start = x.smaller_from
    if start is None or (x.longest is not None and start > x.longest):
        kind = "no"
    if x.recall is not None:
        distance, original, ours = x.recall
        shares = f"{100 * ours:.0f} %, the original {100 * original:.0f} %"
        words.append(f"Of facts up to {distance:,} tokens back it recalls {shares}.")
    if x.forgets_from is not None:
        words.append(f"Facts stated {x.forgets_from:,} or more tokens before are lost.")
    if x.timed:
        words.append(
            "It does not write faster here."
            if x.faster_from is None
            else f"It writes faster from {_round(x.faster_from)} tokens on."
        )
    if x.tasks is not None:
        before, after = (f"{100 * share:.1f} %" for share in x.tasks)
        words.append(f"Tasks: {after} right, the original {before}.")
    measured = {"speed": x.timed, "tasks": x.tasks is not None, "recall": x.recall is not None}
    return _said(kind, " ".join(words), measured)


def _cache(x: Figures) -> str:
    start, length = x.smaller_from, x.length
    if start is None or (x.longest is not None and start > x.longest):
        where = "at any length" if x.longest is None else f"up to the model's {x.longest:,} positions"
        return f"but its {size(x.state_bytes)} of cache are no less than the original's {where}"
    before, after = (x.token_bytes + x.kept_bytes) * length, x.state_bytes + x.kept_bytes * length
    words = f"cache {factor(before, after)} at {length:,} tokens"
    return words if after < before else f"{words}, smaller from {_round(start)} tokens on"


def _encoder(x: Figures) -> dict[str, Any]:
    worst = x.interval[0]
    kind = likeness_level(worst)
    words = f"{_CLOSE[kind].partition(',')[0]}: the embeddings agree by {figure(worst)}"
    if not x.timed:
        kind = "care" if kind == "use" else kind
    elif x.faster_from is None:
        kind, words = "no", f"{words}, but up to {x.longest:,} tokens it does not read faster"
    else:
        words += f", and it reads faster from {_round(x.faster_from)} tokens on"
    return _said(kind, f"{words}.", {"speed": x.timed})


def _said(kind: str, sentence: str, measured: dict[str, bool]) -> dict[str, Any]:
    unchecked = [name for name, known in measured.items() if not known]
    return {"level": kind, "sentence": sentence, "unchecked": unchecked}


def _round(tokens: float) -> str:
    """Two digits are all that these lengths are worth."""
    digits = 10 ** max(0, math.floor(math.log10(max(tokens, 1))) - 1)
    return f"{round(tokens / digits) * digits:,}"
