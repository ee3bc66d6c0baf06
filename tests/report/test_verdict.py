"""The sentence on whether to use a student follows from its figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dofla.report.verdict import GAPS, LIKENESS, Figures, verdict

GOOD = Figures(
    language=True,
    worst=0.05,
    mean=0.04,
    state_bytes=100_000,
    token_bytes=1_000,
    longest=2048,
    faster_from=700.0,
    timed=True,
    forgets_from=None,
    learns=True,
)
ENCODER = replace(GOOD, language=False, worst=0.99, longest=512, faster_from=200.0)


@pytest.mark.parametrize(
    ("figures", "level", "words"),
    [
        (GOOD, "use", ["beyond 100 tokens", "0.040 nats", "97.7 KiB", "from 700 tokens on"]),
        (replace(GOOD, forgets_from=256), "use", ["not to look up facts told 256 or more tokens before"]),
        (replace(GOOD, faster_from=None), "use", ["no faster at writing"]),
        (replace(GOOD, worst=0.2), "care", ["only where memory decides"]),
        (replace(GOOD, worst=2.9, mean=2.77), "no", ["Do not use it", "2.770 nats", "perplexity × 16"]),
        (replace(GOOD, worst=2.9), "no", ["give it more bytes, strategy measured, longer training, or training end"]),
        (replace(GOOD, worst=2.9, learns=False), "no", ["more bytes, features to train (strategy measured), or"]),
        (replace(GOOD, worst=float("nan")), "no", ["Do not use it"]),
        (replace(GOOD, state_bytes=5_000_000), "no", ["no less than the original's cache", "2,048 tokens"]),
        (replace(GOOD, token_bytes=0, longest=None), "no", ["cache of any text"]),
        (ENCODER, "use", ["beyond 200 tokens", "0.990"]),
        (replace(ENCODER, worst=0.95), "care", ["beyond 200 tokens", "changes some rankings"]),
        (replace(ENCODER, worst=0.5), "no", ["0.500 only"]),
        (replace(ENCODER, faster_from=None), "no", ["no reason to use it", "up to 512 tokens"]),
        (replace(ENCODER, faster_from=None, timed=False), "care", ["not measured"]),
    ],
)
def test_sentences(figures, level, words):
    said = verdict(figures)
    assert said["level"] == level
    for word in words:
        assert word in said["sentence"]


@given(worst=st.floats(-1, 10), state=st.integers(1, 10**9), token=st.integers(1, 10**6), longest=st.integers(1, 10**6))
def test_nothing_is_recommended_that_loses_more_or_saves_nothing(worst, state, token, longest):
    figures = replace(GOOD, worst=worst, mean=worst, state_bytes=state, token_bytes=token, longest=longest)
    level = verdict(figures)["level"]
    saves = token * longest > state
    assert (level == "use") == (worst <= GAPS[0] and saves)
    assert (level == "no") == (worst > GAPS[1] or not saves)
    if saves:
        from_here = figures.smaller_from
        assert token * from_here > state >= token * (from_here - 1)


@given(worst=st.floats(-1, 1))
def test_an_encoder_is_judged_by_its_likeness(worst):
    level = verdict(replace(ENCODER, worst=worst))["level"]
    assert (level == "use") == (worst >= LIKENESS[0])
    assert (level == "no") == (worst < LIKENESS[1])
