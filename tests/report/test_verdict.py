"""The sentence on whether to use a student follows from its figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dofla.evaluation.verdict import LIKENESS, LOSSES
from dofla.report.verdict import Figures, verdict

GOOD = Figures(
    language=True,
    increase=0.04,
    interval=[0.03, 0.05],
    length=512,
    state_bytes=100_000,
    token_bytes=1_000,
    kept_bytes=0,
    longest=2048,
    faster_from=700.0,
    timed=True,
    recall=(256, 0.9, 0.85),
    forgets_from=None,
    tasks=(0.5, 0.45),
)
BARE = replace(GOOD, faster_from=None, timed=False, recall=None, tasks=None)
ENCODER = replace(GOOD, language=False, interval=[0.99, 0.99], longest=512, faster_from=200.0)


@pytest.mark.parametrize(
    ("figures", "level", "words"),
    [
        (GOOD, "use", ["perplexity +4.08 % (95 % interval +3.05 % to +5.13 %), cache 5.12 x smaller at 512 tokens."]),
        (GOOD, "use", ["writes faster from 700 tokens on", "256 tokens back it recalls 85 %, the original 90 %"]),
        (GOOD, "use", ["Tasks: 45.0 % right, the original 50.0 %."]),
        (replace(GOOD, forgets_from=256), "use", ["Facts stated 256 or more tokens before are lost."]),
        (replace(GOOD, faster_from=None), "use", ["does not write faster here"]),
        (replace(GOOD, interval=[0.1, 0.2]), "care", ["Worse than the original, of use where memory decides"]),
        (replace(GOOD, interval=[2.5, 2.9], increase=2.77), "no", ["Far from the original", "perplexity x 16.0"]),
        (replace(GOOD, interval=[float("nan")] * 2), "no", ["Far from the original"]),
        (replace(GOOD, length=64), "use", ["cache 1.56 x larger at 64 tokens, smaller from 100 tokens on"]),
        (replace(GOOD, state_bytes=5_000_000), "no", ["no less than the original's", "2,048 positions"]),
        (replace(GOOD, token_bytes=0, longest=None), "no", ["no less than the original's at any length"]),
        (ENCODER, "use", ["from 200 tokens on", "0.990"]),
        (replace(ENCODER, interval=[0.95, 0.95]), "care", ["Worse than the original", "from 200 tokens on"]),
        (replace(ENCODER, interval=[0.5, 0.5]), "no", ["agree by 0.500"]),
        (replace(ENCODER, faster_from=None), "no", ["up to 512 tokens it does not read faster"]),
        (replace(ENCODER, faster_from=None, timed=False), "care", ["agree by 0.990."]),
    ],
)
def test_sentences(figures, level, words):
    said = verdict(figures)
    assert said["level"] == level
    for word in words:
        assert word in said["sentence"]


def test_what_was_not_measured_is_named_and_not_claimed():
    assert verdict(GOOD)["unchecked"] == []
    said = verdict(BARE)
    assert said["unchecked"] == ["speed", "tasks", "recall"]
    for word in ("faster", "recall", "Tasks", "lost"):
        assert word not in said["sentence"]
    assert verdict(replace(ENCODER, timed=False))["unchecked"] == ["speed"]


@given(worst=st.floats(-1, 10), state=st.integers(1, 10**9), token=st.integers(1, 10**6), longest=st.integers(1, 10**6))
def test_nothing_is_recommended_that_loses_more_or_saves_nothing(worst, state, token, longest):
    figures = replace(
        GOOD, interval=[worst, worst], increase=worst, state_bytes=state, token_bytes=token, longest=longest
    )
    level = verdict(figures)["level"]
    saves = token * longest > state
    assert (level == "use") == (worst <= LOSSES[0] and saves)
    assert (level == "no") == (worst > LOSSES[1] or not saves)
    if saves:
        from_here = figures.smaller_from
        assert token * from_here > state >= token * (from_here - 1)


@given(worst=st.floats(-1, 1))
def test_an_encoder_is_judged_by_its_likeness(worst):
    level = verdict(replace(ENCODER, interval=[worst, worst]))["level"]
    assert (level == "use") == (worst >= LIKENESS[0])
    assert (level == "no") == (worst < LIKENESS[1])
