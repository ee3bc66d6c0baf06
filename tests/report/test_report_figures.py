"""Crossings, recall by distance, and maps: the arithmetic behind the page."""

from __future__ import annotations

import base64
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dofla
from dofla.data import TokenWindows
from dofla.evaluation.samples import Prompt, beginnings
from dofla.report.maps import LEVELS, attention_maps, moved, packed, sentence, token_texts
from dofla.report.page import degrees_of_freedom
from dofla.report.recall import by_distance, forgets_from
from dofla.report.speed import crossing, timings
from dofla.report.texts import side_by_side

LENGTHS = [128 * 2**n for n in range(5)]


@given(st.floats(-2, 2), st.floats(0.3, 3), st.floats(150, 1900))
def test_two_power_laws_cross_where_they_do(level, slope, where):
    student = [(n, 10**level) for n in LENGTHS]
    teacher = [(n, 10**level * (n / where) ** slope) for n in LENGTHS]
    assert crossing(teacher, student) == pytest.approx(where)
    assert crossing(student, teacher) is None


def test_crossings_at_the_ends():
    slow, fast = [(n, 2.0) for n in LENGTHS], [(n, 1.0) for n in LENGTHS]
    assert crossing(slow, fast) == LENGTHS[0]
    assert crossing(fast, slow) is None
    assert crossing(slow, slow) is None
    assert crossing([(1, 1.0)], [(2, 1.0)]) is None
    # Ahead, behind, and ahead again: what counts is from where on.
    teacher = list(zip(LENGTHS, (2, 0.5, 0.5, 2, 2), strict=True))
    assert LENGTHS[2] < crossing(teacher, fast) < LENGTHS[3]


def cell(length, depth, teacher, student, n=10):
    figures = [{"accuracy": x, "greedy": x / 2, "loss": 1.0} for x in (teacher, student)]
    return {"length": length, "depth": depth, "n": n, "chance": 0.1, "teacher": figures[0], "student": figures[1]}


def test_recall_by_distance():
    records = [cell(256, 0.0, 0.9, 0.3), cell(512, 0.5, 0.7, 0.1, n=30), cell(256, 1.0, 1.0, 1.0)]
    near, far = by_distance({"text": "word pairs", "records": records})
    assert (near["distance"], near["student"], near["n"]) == (16, 1.0, 10)
    assert (far["distance"], far["n"]) == (256, 40)
    assert far["teacher"] == pytest.approx((0.9 * 10 + 0.7 * 30) / 40)
    told = by_distance({"text": "villagers", "records": [cell(64, 1.0, 1, 1), cell(64, 0.0, 1, 0)]})
    assert [(x["distance"], x["student"]) for x in told] == [(64, 0.5)]


def points(*pairs):
    return [{"distance": 16 * 2**n, "chance": 0.1, "teacher": a, "student": b} for n, (a, b) in enumerate(pairs)]


def test_what_counts_as_forgotten():
    assert forgets_from(points((1, 1), (1, 0.9), (1, 0.3), (0.9, 0.1))) == 64
    assert forgets_from(points((1, 1), (1, 0.3), (1, 0.9))) is None
    assert forgets_from(points((1, 0.2), (0.9, 0.2))) == 16
    # Where the original itself only guesses, the student has nothing to forget.
    assert forgets_from(points((1, 1), (1, 0.2), (0.12, 0.1))) == 32
    assert forgets_from(points((0.12, 0.1))) is None
    assert forgets_from([]) is None


def test_maps_are_those_of_the_attention(tiny):
    model = tiny.llama()
    # Heads keep all 24 tokens exactly in one student, next to nothing in the other.
    for window, expected in ((24, 0.0), (1, None)):
        student = dofla.linearize(model, tiny.plan(model, 4, window=window))
        teacher, ours = attention_maps(student, tiny.tokens(1, 24))
        assert list(teacher) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
        for maps in (teacher, ours):
            for values in maps.values():
                assert values.shape == (4, 24, 24)
                torch.testing.assert_close(values.sum(-1), torch.ones(4, 24))
                assert not values.triu(1).any()
        shares = moved(teacher, ours)
        if expected is not None:
            assert max(max(row) for row in shares.values()) == pytest.approx(expected, abs=1e-4)
        else:
            assert 0 < shares["model.layers.1.self_attn"][0] <= 1
        dofla.restore(model)
    text = packed(teacher)["model.layers.0.self_attn"]
    levels = torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(text), -15)), dtype=torch.uint8)
    found = (levels.view(4, 24, 24) / LEVELS).square()
    torch.testing.assert_close(found, teacher["model.layers.0.self_attn"], atol=1 / LEVELS, rtol=0)


def test_the_text_begins_with_a_sentence_and_fits_the_page():
    pieces = [" a"] * 10 + [" end."] + [" b"] * 200
    packed_windows = TokenWindows(torch.zeros(1, len(pieces), dtype=torch.int64))
    assert sentence(packed_windows, pieces, heads=8, models=2) == (11, 107)
    assert sentence(packed_windows, pieces, heads=2000, models=9) == (11, 43)
    padded = TokenWindows(packed_windows.input_ids, torch.ones(1, len(pieces), dtype=torch.int64))
    assert sentence(padded, pieces, heads=8, models=2) == (0, 96)
    assert sentence(packed_windows, pieces[:20], heads=8, models=2) == (0, 20)


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", errors="replace")


@given(st.text(max_size=30).filter(lambda text: "\N{REPLACEMENT CHARACTER}" not in text))
def test_tokens_join_to_the_text(text):
    pieces = token_texts(Bytes(), list(text.encode()))
    assert len(pieces) == len(text.encode())
    assert "".join(pieces) == text
    assert token_texts(None, [3, 4]) == [" 3", " 4"]


def test_continuations_of_an_exact_student_never_part(tiny):
    model = tiny.llama()
    prompts = [Prompt(ids, 12) for ids in tiny.tokens(2, 20)]
    for window, same in ((64, True), (1, False)):
        student = dofla.linearize(model, tiny.plan(model, 1, window=window, feature_map="prf"))
        rows = side_by_side(student, None, prompts)
        assert len(rows) == 2
        for row in rows:
            assert len(row["teacher"]) == len(row["student"]) == 12
            assert row["teacher"][: row["agree"]] == row["student"][: row["agree"]]
            if row["agree"] < 12:
                assert row["teacher"][row["agree"]] != row["student"][row["agree"]]
        assert all(row["agree"] == 12 for row in rows) == same
        dofla.restore(model)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_timings_have_both_at_the_same_lengths(tiny, kind):
    model = getattr(tiny, kind)(max_position_embeddings=300) if kind != "gpt2" else tiny.gpt2(n_positions=300)
    layer = next(iter(tiny.plan(model).layers)).name
    plan = tiny.plan(model, 4, window=2)
    plan[layer].keep_softmax = True
    student = dofla.linearize(model, plan)
    record = timings(student, tiny.tokens(1, 20)[0])
    for what in ("read", "write"):
        lengths = [[n for n, _ in record[who].get(what, [])] for who in ("teacher", "student")]
        assert lengths[0] == lengths[1]
        assert lengths[0] == ([] if (kind, what) == ("bert", "write") else [128, 256])
        assert all(seconds > 0 for who in ("teacher", "student") for _, seconds in record[who].get(what, []))


def test_the_page_knows_the_standard_error_of_every_degree(tiny):
    model, tokens = tiny.llama(), tiny.tokens(9, 40)
    for windows, known in ((tokens, True), (tokens[:1], False)):
        profile = dofla.profile(model, windows, samples=40)
        found = degrees_of_freedom(profile, 0.03)
        for shown, errors in zip(found["errors"], profile.dof_errors(0.03), strict=True):
            # Two digits are kept.
            assert shown == ([pytest.approx(error, rel=0.051) for error in errors] if known else [None, None])


def test_prompts_begin_with_a_document_or_a_sentence():
    def windows(text):
        return TokenWindows(torch.tensor([[0 if letter == "|" else ord(letter) for letter in text]]))

    class Letters(Bytes):
        all_special_ids = (0,)

    for text, expected in (
        ("of it.|Once upon a.", "|Once"),
        ("of it. Once upon a.", " Once"),
        ("no ends here at all", "no en"),
    ):
        ((ids, new),) = beginnings(windows(text), Letters(), prompts=3, prompt_tokens=5, new_tokens=7)
        assert ("".join(chr(i) if i else "|" for i in ids.tolist()), new) == (expected, 7)
    ((ids, _),) = beginnings(windows("of it. Once"), None, prompts=1, prompt_tokens=50, new_tokens=7)
    assert len(ids) == 11
