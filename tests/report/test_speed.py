"""Speed: what is timed, and where two curves cross."""

import json
import shutil

import pytest
from command_line import call, refused
from hypothesis import given
from hypothesis import strategies as st
from students import keep_softmax

import dofla
from dofla.report import speed
from dofla.report.runs import SPEED, read_run
from dofla.report.speed import crossing, timings
from dofla.storage.lock import locked

LENGTHS = [128 * 2**n for n in range(5)]


@given(st.floats(-2, 2), st.floats(0.3, 3), st.floats(150, 1900))
def test_two_power_laws_cross_where_they_do(level, slope, where):
    model = [(n, 10**level) for n in LENGTHS]
    original = [(n, 10**level * (n / where) ** slope) for n in LENGTHS]
    assert crossing(original, model) == pytest.approx(where)
    assert crossing(model, original) is None


def test_crossings_at_the_ends():
    slow, fast = [(n, 2.0) for n in LENGTHS], [(n, 1.0) for n in LENGTHS]
    assert crossing(slow, fast) == LENGTHS[0]
    assert crossing(fast, slow) is None
    assert crossing(slow, slow) is None
    assert crossing([(1, 1.0)], [(2, 1.0)]) is None
    # Ahead, behind, and ahead again: what counts is from where on.
    original = list(zip(LENGTHS, (2, 0.5, 0.5, 2, 2), strict=True))
    assert LENGTHS[2] < crossing(original, fast) < LENGTHS[3]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_timings_have_both_at_the_same_lengths(tiny, kind):
    model = getattr(tiny, kind)(**{"n_positions" if kind == "gpt2" else "max_position_embeddings": 300})
    plan = tiny.plan(model, 4, window=2)
    record = timings(dofla.linear.linearize(model, keep_softmax(plan, 0)), tiny.tokens(1, 20)[0])
    for what in ("prefill", "decode"):
        lengths = [[n for n, _ in record[who].get(what, [])] for who in ("original", "model")]
        assert lengths[0] == lengths[1] == ([] if (kind, what) == ("bert", "decode") else [128, 256])
        assert all(seconds > 0 for who in ("original", "model") for _, seconds in record[who].get(what, []))


@pytest.mark.slow
def test_the_best_models_are_timed_once_when_that_is_asked_for(llama_run, tmp_path, capsys, monkeypatch):
    run, out = shutil.copytree(llama_run, tmp_path / "run"), tmp_path / "page.html"
    monkeypatch.setattr(speed, "MOST", 1)
    best, second, *_ = read_run(run).models
    with locked(run):
        assert "in use" in refused(capsys, "report", run, "--speed", "--out", out)
    assert call("report", run, "--speed", "--out", out) == 0
    assert [path.parent for path in run.rglob(SPEED)] == [best.folder]
    kept = (best.folder / SPEED).read_bytes()
    assert json.loads(kept)["model"]["decode"]
    assert call("report", run, "--speed", "--out", out) == 0
    assert (best.folder / SPEED).read_bytes() == kept
    assert "Decode is " in out.read_text()
    monkeypatch.setattr(speed, "MOST", 2)
    shutil.rmtree(second.adapter)
    assert str(second.adapter) in refused(capsys, "report", run, "--speed", "--out", out)
