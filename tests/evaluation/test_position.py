"""Loss by position against losses computed one window at a time."""

from __future__ import annotations

import json

import pytest
import torch
from arithmetic import sum_error
from students import student_of

import dofla
from dofla.data import TokenWindows
from dofla.errors import DoflaError
from dofla.evaluation import loss_by_position
from dofla.evaluation.language import next_token_figures
from dofla.evaluation.position import ratio_error

LENGTH = 20
EDGES = [0, 1, 2, 4, 8, 16]


def by_hand(student, text):
    """Losses of teacher and student [L - 1] for one text without padding."""
    with torch.no_grad():
        ours = student(text[None]).logits[0]
        with dofla.softmax(student):
            theirs = student(text[None]).logits[0]
    targets = text[1:]
    return [torch.nn.functional.cross_entropy(x[:-1].double(), targets, reduction="none") for x in (theirs, ours)]


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_bins_add_up_to_the_figures_of_all_tokens(tiny, kind, side):
    student = student_of(tiny, kind)
    windows = TokenWindows.of(tiny.padded(5, LENGTH, side) if side else tiny.tokens(5, LENGTH))
    record, whole = loss_by_position(student, windows, batch_size=2, edges=EDGES), next_token_figures(student, windows)
    assert record.tokens == sum(row.tokens for row in record.bins) == whole["tokens"]
    for name in ("teacher_loss", "student_loss", "loss_increase"):
        total = sum(row.tokens * getattr(row, name) for row in record.bins)
        assert total / record.tokens == pytest.approx(whole[name], rel=1e-4)
    assert json.loads(json.dumps(record.to_dict())) == record.to_dict()


def test_each_bin_holds_the_losses_of_its_positions(tiny):
    student, tokens = student_of(tiny), tiny.tokens(3, LENGTH)
    teacher, ours = (torch.stack(x) for x in zip(*(by_hand(student, text) for text in tokens), strict=True))
    record = loss_by_position(student, TokenWindows.of(tokens), edges=EDGES, batch_size=3)
    assert [(row.first, row.last) for row in record.bins] == [
        (0, 0),
        (1, 1),
        (2, 3),
        (4, 7),
        (8, 15),
        (16, 18),
    ]
    for row in record.bins:
        here = slice(row.first, row.last + 1)
        assert row.tokens == ours[:, here].numel()
        assert row.teacher_loss == pytest.approx(teacher[:, here].mean().item(), rel=1e-5)
        assert row.student_loss == pytest.approx(ours[:, here].mean().item(), rel=1e-5)
        gaps = (ours - teacher)[:, here].mean(dim=1)
        rounding = sum_error(8, 6.0)  # of the difference of two losses of about 6 nats, each rounded a few times
        assert row.loss_increase == pytest.approx(gaps.mean().item(), abs=rounding)
        assert row.loss_increase_error == pytest.approx(gaps.std().item() / 3**0.5, abs=rounding)


def test_padding_shifts_no_position(tiny):
    left, right = tiny.padded(4, LENGTH, "left"), tiny.padded(4, LENGTH, "right")
    # The same texts, padded on the other side.
    for n in range(4):
        right["input_ids"][n, : right["attention_mask"][n].sum()] = left["input_ids"][n][
            left["attention_mask"][n].bool()
        ]
    student = student_of(tiny)
    one, other = (loss_by_position(student, TokenWindows.of(batch), edges=EDGES) for batch in (left, right))
    assert [row.tokens for row in one.bins] == [row.tokens for row in other.bins]
    for a, b in zip(one.bins, other.bins, strict=True):
        # Only the teacher's: rotary scores know distances, while features also see how far padding shifts a text.
        assert a.teacher_loss == pytest.approx(b.teacher_loss, rel=1e-4)


def test_bins_that_no_text_reaches_are_left_out(tiny):
    batch = {"input_ids": tiny.tokens(2, LENGTH), "attention_mask": torch.ones(2, LENGTH, dtype=torch.int64)}
    batch["attention_mask"][:, 5:] = 0
    record = loss_by_position(student_of(tiny), TokenWindows.of(batch), edges=EDGES)
    assert [(row.first, row.tokens) for row in record.bins] == [(0, 2), (1, 2), (2, 4)]


def test_default_bins_double(tiny):
    record = loss_by_position(student_of(tiny), TokenWindows.of(tiny.tokens(2, 100)))
    assert [(row.first, row.last) for row in record.bins] == [(0, 15), (16, 31), (32, 63), (64, 98)]


@pytest.mark.parametrize("plan", [{"keep_softmax": True}, {"window": LENGTH}])
def test_a_student_whose_attention_is_exact_has_no_gap_anywhere(tiny, plan):
    record = loss_by_position(student_of(tiny, **plan), TokenWindows.of(tiny.tokens(4, LENGTH)), edges=EDGES)
    for row in record.bins:
        assert row.loss_increase == pytest.approx(0, abs=1e-5)
        assert row.loss_increase_error == pytest.approx(0, abs=1e-5)


def test_a_window_shows_where_it_ends(tiny):
    record = loss_by_position(student_of(tiny, window=4), TokenWindows.of(tiny.tokens(4, LENGTH)), edges=[0, 4])
    assert record.bins[0].loss_increase == pytest.approx(0, abs=1e-5)
    assert abs(record.bins[1].loss_increase) > 1e-3


def test_one_window_has_no_standard_error(tiny):
    record = loss_by_position(student_of(tiny), TokenWindows.of(tiny.tokens(1, LENGTH)))
    assert record.bins[0].loss_increase_error is None


def test_the_error_of_a_ratio_is_what_repetition_shows():
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(1, 9, (3000, 40), generator=generator).double()
    totals = counts * 2 + counts * torch.randn(3000, 40, generator=generator, dtype=torch.float64)
    spread = (totals.sum(1) / counts.sum(1)).std().item()
    errors = [ratio_error(*rows) for rows in zip(totals[:300], counts[:300], strict=True)]
    assert sum(errors) / len(errors) == pytest.approx(spread, rel=0.1)


@pytest.mark.parametrize("edges", [[], [1, 2], [0, 4, 4], [0, 8, 4]])
def test_edges_that_do_not_ascend_from_zero_are_refused(tiny, edges):
    with pytest.raises(DoflaError, match="edges"):
        loss_by_position(student_of(tiny), TokenWindows.of(tiny.tokens(2, LENGTH)), edges=edges)


def test_a_student_that_returns_nan_is_an_error(tiny):
    student = student_of(tiny)
    with torch.no_grad():
        student.model.layers[0].self_attn.dofla.maps[0].z.fill_(torch.nan)
    with pytest.raises(DoflaError, match="NaN or infinity"):
        loss_by_position(student, TokenWindows.of(tiny.tokens(2, LENGTH)))
    with pytest.raises(DoflaError, match="windows of one token"):
        loss_by_position(student, TokenWindows.of(tiny.tokens(2, 1)))
