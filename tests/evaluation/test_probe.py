"""All probes in one record, and its tables."""

from __future__ import annotations

import json

import pytest
from students import reader_of

from dofla.data import TokenWindows
from dofla.errors import DoflaError
from dofla.evaluation import generation_figures, loss_by_position, passkey_figures, recall_figures
from dofla.evaluation.position import PositionBin, Positions
from dofla.evaluation.probe import PROBES, Probe, probe
from dofla.evaluation.recall import Answers, Recall, RecallRow, WordPairs
from dofla.runs.demo.recall import Villagers

SIZES = {"lengths": (80,), "count": 2, "batch_size": 2}
GENERATION = {"prompts": 2, "prompt_tokens": 4, "new_tokens": 6}


@pytest.fixture
def student(tiny):
    return reader_of(tiny)


def test_a_record_holds_what_its_parts_give(tiny, tokenizer, student):
    windows, seen = TokenWindows(tiny.tokens(3, 24), source="some text"), []
    student.train()
    record = probe(student, tokenizer, windows, seed=1, progress=lambda *x: seen.append(x), **SIZES, **GENERATION)
    assert student.training
    student.eval()
    assert record.positions == loss_by_position(student, windows, batch_size=2)
    assert record.generation == generation_figures(student, windows, batch_size=2, seed=1, **GENERATION)
    assert record.recall.text == "word pairs"
    assert record.recall == recall_figures(student, WordPairs(tokenizer), seed=1, **SIZES)
    assert record.passkey == passkey_figures(student, tokenizer, seed=1, **SIZES)
    assert (record.source, record.seed) == ("some text", 1)
    data = record.to_dict()
    assert list(data) == ["model", "strategy", "source", "seed", *PROBES]
    assert (list(data["recall"]), list(data["passkey"])) == (["text", "records"], ["records"])
    assert json.loads(json.dumps(data)) == data
    # Two batches, one of continuations, one of recall prompts, and one for each depth of the pass key.
    assert seen == [(1, 2), (2, 2), (1, 1), (1, 1), *((n, 5) for n in range(1, 6))]
    text = str(record)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for title in (
        "Loss by position",
        "Continuations (2 prompts, 6 new tokens)",
        "Recall, word pairs",
        "Recall, pass key",
    ):
        assert title in text


def test_only_what_is_wanted_is_done(tiny, tokenizer, student):
    windows = TokenWindows.of(tiny.tokens(1, 24))
    record = probe(student, tokenizer, windows, wanted=["recall"], recall_text=Villagers(tokenizer), **SIZES)
    assert set(PROBES) & set(record.to_dict()) == {"recall"}
    assert record.recall.text == "villagers"
    assert str(record).count("depth") == 1
    record = probe(student, tokenizer, windows, wanted=["positions"])
    # A single window has no standard error.
    assert "±" not in str(record)


def test_large_figures_still_fit_the_terminal():
    answers = Answers(accuracy=1.0, loss=123.456, greedy=1.0)
    recall = Recall("word pairs", [RecallRow(131072, 0.25, 10000, 1.0, answers, answers)])
    losses = dict.fromkeys(("teacher_loss", "teacher_loss_error", "student_loss", "student_loss_error"), 123.456)
    bins = [PositionBin(65536, 131070, 10_000_000, **losses, loss_increase=-123.456, loss_increase_error=12.345)]
    text = str(Probe({}, None, "some text", 0, Positions(64, 10_000_000, bins), recall=recall))
    assert "…" not in text
    assert "131072" in text
    assert "-123.456 ± 12.345" in text


def test_what_is_unknown_or_nothing_is_refused(tiny, tokenizer, student):
    windows = TokenWindows.of(tiny.tokens(1, 24))
    with pytest.raises(DoflaError, match="wanted: poetry; choose from positions"):
        probe(student, tokenizer, windows, wanted=["recall", "poetry"])
    with pytest.raises(DoflaError, match="wanted: nothing"):
        probe(student, tokenizer, windows, wanted=[])
    with pytest.raises(DoflaError, match="not linearized"):
        probe(tiny.llama(), tokenizer, windows)
