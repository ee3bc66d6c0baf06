"""Windows read at other positions than their own."""

import pytest
import torch
from sizes import compress
from torch.testing import assert_close

import dofla
from dofla.data import Images, TokenWindows
from dofla.distillation import LOSSES, distill, distill_end_to_end
from dofla.errors import DoflaError
from dofla.integration.converted import Converted
from dofla.integration.placement import (
    calibration_context,
    context_of,
    placed,
    placed_anywhere,
    placed_evenly,
    placed_over,
)

LENGTH, REACH = 16, 48


def student_of(model):
    return dofla.linear.linearize(model, budget=6)


def test_a_rotary_teacher_does_not_notice_where_a_window_stands(tiny):
    model, ids = tiny.llama().eval(), tiny.tokens(2, LENGTH)
    with torch.inference_mode():
        here, there = (model(**placed({"input_ids": ids}, first)).logits for first in (0, 29))
    assert_close(there, here, rtol=1e-3, atol=1e-4)


def test_windows_are_placed_from_the_first_position_to_the_last_that_leaves_room(tiny):
    batch = {"input_ids": tiny.tokens(2, LENGTH), "attention_mask": torch.ones(2, LENGTH, dtype=torch.int64)}
    evenly = [x["position_ids"] for x in placed_evenly(batch, REACH)]
    assert [(int(p[0, 0]), int(p[1, -1])) for p in evenly] == [(0, 15), (10, 25), (21, 36), (32, 47)]
    generator = torch.Generator().manual_seed(0)
    firsts = {int(placed_anywhere(batch, REACH, generator)["position_ids"][0, 0]) for _ in range(400)}
    assert firsts == set(range(REACH - LENGTH + 1))
    assert placed(batch, 3)["attention_mask"] is batch["attention_mask"]


def test_windows_a_memory_is_measured_on_stand_closer_where_all_texts_begin(tiny):
    windows = TokenWindows.of(tiny.tokens(5, LENGTH))
    for batch_size in (1, 2, 5):
        found = list(placed_over(windows, batch_size, REACH))
        positions = torch.cat([batch["position_ids"] for batch in found])
        assert positions[:, 0].tolist() == [0, 2, 8, 18, 32]
        assert (positions - positions[:, :1] == torch.arange(LENGTH)).all()
        assert torch.equal(torch.cat([batch["input_ids"] for batch in found]), windows.input_ids)
    assert all("position_ids" not in batch for batch in placed_over(windows, 2, None))
    (alone,) = placed_over(windows.take(1), 1, REACH)
    assert alone["position_ids"][0, 0] == 0


def test_codes_are_measured_over_all_positions_of_a_model_that_rotates_them(tiny):
    windows = TokenWindows.of(tiny.tokens(3, LENGTH))
    assert calibration_context(tiny.llama(max_position_embeddings=100), windows, None) == 100
    assert calibration_context(tiny.llama(max_position_embeddings=LENGTH), windows, None) is None
    assert calibration_context(tiny.llama(), windows, 40) == 40
    assert calibration_context(tiny.gpt2(), windows, None) is None
    with pytest.raises(DoflaError, match="context is 40: GPT2LMHeadModel has no rotary positions"):
        compress(tiny.gpt2(), windows, tokens=16, context=40)
    with pytest.raises(DoflaError, match="context is 8, less than the windows' 16 tokens"):
        compress(tiny.llama(), windows, tokens=16, context=8)


@pytest.mark.parametrize("head_budgets", ["even", "measured"])
def test_a_memory_that_fades_reads_far_positions_as_well_as_the_first(tiny, head_budgets):
    model, windows = tiny.llama(max_position_embeddings=4096), TokenWindows.of(tiny.tokens(8, 64))
    with torch.no_grad():  # keys of a mean far from 0, as those of trained models have
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias = torch.nn.Parameter(torch.full((layer.self_attn.k_proj.out_features,), 4.0))

    def errors(context):
        compress(model, windows, tokens=32, head_budgets=head_budgets, context=context)
        found = []
        with torch.no_grad():
            for first in (0, 3000):
                batch = placed(windows.batch(range(8)), first)
                ours = model(**batch, use_cache=False).logits.log_softmax(-1)
                with dofla.original(model):
                    theirs = model(**batch, use_cache=False).logits.log_softmax(-1)
                found.append((theirs.exp() * (theirs - ours)).sum(-1).mean().item())
        dofla.restore(model)
        return found

    near, far = errors(64)
    assert far > 1.3 * near
    all_near, all_far = errors(None)
    assert all_far < far
    assert all_far / all_near < 0.9 * far / near


def test_the_layers_are_trained_on_the_keys_of_those_positions(tiny, monkeypatch):
    seen = []

    def spy(call, layer, rows):
        if call.name.endswith("layers.0.self_attn"):
            seen.append(call.key.clone())
        return LOSSES["softmax"](call, layer, rows)

    monkeypatch.setitem(LOSSES, "spy", spy)
    same = tiny.tokens(1, LENGTH).repeat(2, 1)  # every window is the same text
    distill(student_of(tiny.llama()), same, loss="spy", steps=6, batch_size=1, context=REACH)
    assert len({tuple(key.flatten().tolist()) for key in seen}) > 2
    seen.clear()
    distill(student_of(tiny.llama()), same, loss="spy", steps=6, batch_size=1, context=LENGTH)
    assert all(torch.equal(key, seen[0]) for key in seen)


def test_statistics_are_taken_over_the_whole_reach(tiny):
    stds = []
    for options in ({"context": LENGTH}, {"context": REACH}):
        student = student_of(tiny.llama())
        distill(student, tiny.tokens(2, LENGTH), steps=1, learning_rates={}, **options)
        stds.append(next(iter(Converted.of(student).layers.values())).maps[0].key_std.clone())
    assert not torch.allclose(*stds)


def test_hybrid_students_with_rotary_positions_reach_four_lengths_unless_told_otherwise(tiny):
    windows = TokenWindows.of(tiny.tokens(2, LENGTH))
    student = student_of(tiny.llama())
    few, fewer = (student_of(tiny.llama(max_position_embeddings=LENGTH + n)) for n in (5, 0))
    gpt2, features_alone = student_of(tiny.gpt2()), tiny.llama()
    dofla.linear.linearize(features_alone, tiny.plan(features_alone))
    for model, asked, context in (
        (student, None, 4 * LENGTH),
        (student, LENGTH, None),
        (student, REACH, REACH),
        (few, None, LENGTH + 5),
        (fewer, None, None),
        (gpt2, None, None),
        (gpt2, LENGTH, None),
        (features_alone, None, None),
    ):
        assert context_of(Converted.of(model), windows, asked) == context


@pytest.mark.parametrize("train", [distill, distill_end_to_end])
def test_the_same_seed_places_windows_alike_and_the_record_says_how_far_they_reach(tiny, train):
    runs = [
        train(student_of(tiny.llama()), tiny.tokens(4, LENGTH), steps=2, batch_size=2, context=context, seed=seed)
        for context, seed in ((None, 1), (4 * LENGTH, 1), (None, 2), (LENGTH, 1))
    ]
    assert [run.settings["context"] for run in runs] == [4 * LENGTH] * 3 + [None]
    first, same, *others = (run.losses for run in runs)
    assert torch.equal(first, same)
    assert not any(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("train", [distill, distill_end_to_end])
def test_a_reach_that_cannot_be_is_refused(tiny, train):
    student, tokens = student_of(tiny.llama()), tiny.tokens(2, LENGTH)
    most = student.config.max_position_embeddings
    with pytest.raises(DoflaError, match="context is 8, less than the windows' 16 tokens"):
        train(student, tokens, steps=1, context=8)
    with pytest.raises(DoflaError, match=f"context is {most + 1}: the model has {most} positions"):
        train(student, tokens, steps=1, context=most + 1)
    with pytest.raises(DoflaError, match="GPT2LMHeadModel has no rotary positions"):
        train(student_of(tiny.gpt2()), tokens, steps=1, context=32)
    with pytest.raises(DoflaError, match="images have no positions"):
        train(student, Images(torch.zeros(2, 3, 8, 8)), steps=1, context=32)
