"""Continuations against transformers' generation, agreement and losses against full forward passes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import astuple

import pytest
import torch
from students import student_of

import dofla
from dofla.data import TokenWindows
from dofla.errors import DoflaError
from dofla.evaluation import generation_figures
from dofla.evaluation.generation import TEXTS, Agreement, decode, repeated
from dofla.serving.prompt_state import read_prompt

PROMPT, NEW, COUNT = 6, 10, 5
SIZES = {"prompts": COUNT, "prompt_tokens": PROMPT, "new_tokens": NEW}


def windows_of(tiny, count=COUNT):
    return TokenWindows.of(tiny.tokens(count, PROMPT + NEW + 3))


def generated(model, prompts):
    options = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": NEW, "do_sample": False}
    return model.generate(prompts, pad_token_id=0, **options)[:, PROMPT:]


def losses(model, prompts, text):
    with torch.no_grad():
        logits = model(torch.cat([prompts, text], dim=1)).logits[:, PROMPT - 1 : -1].double()
    return -logits.log_softmax(-1).gather(-1, text[..., None])[..., 0], logits.argmax(-1)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_figures_are_those_of_texts_generated_and_scored_by_hand(tiny, kind):
    student, windows = student_of(tiny, kind, window=2), windows_of(tiny)
    figures = generation_figures(student, windows, batch_size=2, **SIZES)
    prompts, text = windows.input_ids[:, :PROMPT], windows.input_ids[:, PROMPT : PROMPT + NEW]
    with dofla.softmax(student):
        teacher = generated(student, prompts)
    ours = generated(student, prompts)
    for name, tokens in (("text", text), ("teacher_greedy", teacher), ("student_greedy", ours)):
        row = figures.texts[name]
        for who, attention in (("teacher_loss", dofla.softmax(student)), ("student_loss", nullcontext())):
            with attention:
                expected = losses(student, prompts, tokens)[0].mean(dim=1)
            assert getattr(row, who) == pytest.approx(expected.mean().item(), rel=1e-4)
            assert getattr(row, f"{who}_error") == pytest.approx(expected.std().item() / COUNT**0.5, rel=1e-3)
        assert row.repeated == pytest.approx(repeated(tokens).mean().item())
    same = teacher == ours
    forced = losses(student, prompts, teacher)[1] == teacher
    until = torch.stack([same[:, : n + 1].all(dim=1) for n in range(NEW)], dim=1)
    for name, shares in (("token", same), ("forced", forced), ("prefix", until)):
        assert getattr(figures.agreement, name) == pytest.approx(shares.double().mean(dim=0).tolist())
    assert figures.agreed_tokens == pytest.approx(until.sum(dim=1).double().mean().item())
    assert 0 < sum(figures.agreement.forced) < NEW
    assert json.loads(json.dumps(figures.to_dict())) == figures.to_dict()


@pytest.mark.parametrize("plan", [{"keep_softmax": True}, {"window": 64}])
def test_a_student_whose_attention_is_exact_writes_what_its_teacher_writes(tiny, plan):
    figures = generation_figures(student_of(tiny, **plan), windows_of(tiny), batch_size=5, **SIZES)
    assert figures.agreement == Agreement(*[[1.0] * NEW] * 3)
    assert figures.agreed_tokens == NEW
    for how in ("greedy", "sampled"):
        one, other = (astuple(figures.texts[f"{who}_{how}"]) for who in ("teacher", "student"))
        assert one == pytest.approx(other, abs=1e-5)
    for row in figures.texts.values():
        assert row.student_loss == pytest.approx(row.teacher_loss, abs=1e-4)


def test_agreement_is_lost_once_and_for_all_when_texts_must_stay_the_same(tiny):
    prefix = generation_figures(student_of(tiny), windows_of(tiny), batch_size=5, **SIZES).agreement.prefix
    assert prefix == sorted(prefix, reverse=True)


def test_only_sampling_depends_on_the_seed_and_nothing_on_the_batch_size(tiny):
    student, windows = student_of(tiny), windows_of(tiny)
    one, same, other = (generation_figures(student, windows, seed=seed, batch_size=5, **SIZES) for seed in (1, 1, 2))
    assert one == same
    assert one.agreement == other.agreement
    for name in TEXTS:
        assert (one.texts[name] == other.texts[name]) == (not name.endswith("sampled"))
    batched = generation_figures(student, windows, seed=1, batch_size=2, **SIZES)
    for name in TEXTS:
        assert astuple(batched.texts[name]) == pytest.approx(astuple(one.texts[name]), rel=1e-4)


def test_sampled_tokens_follow_the_models_distribution(tiny):
    student = student_of(tiny)
    prompt = tiny.tokens(1, PROMPT).expand(4000, -1)
    draws = torch.rand(4000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.inference_mode():
        tokens = decode(student, read_prompt(student, prompt[:, :-1]), prompt[:, -1:], 1, draws)
        expected = student(prompt[:1]).logits[0, -1].double().softmax(-1)
    found = tokens[:, 0].bincount(minlength=len(expected)).double() / 4000
    assert (found - expected).abs().sum() < 0.1
    assert expected.max() < 0.9


def test_padded_windows_are_read_without_their_padding_and_short_ones_passed_over(tiny):
    student, batch = student_of(tiny), tiny.padded(6, 2 * (PROMPT + NEW) - 3, "left")
    texts = [ids[mask.bool()] for ids, mask in zip(*batch.values(), strict=True)]
    enough = [text[: PROMPT + NEW] for text in texts if len(text) >= PROMPT + NEW]
    assert 0 < len(enough) < 6
    expected = generation_figures(student, TokenWindows.of(torch.stack(enough)), batch_size=4, **SIZES)
    assert generation_figures(student, TokenWindows.of(batch), batch_size=4, **SIZES) == expected
    assert expected.prompts == len(enough)


def test_repeated_grams_are_counted_within_a_text():
    rows = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 1, 2, 3, 4], [7, 7, 7, 7, 7, 7, 7, 7]]
    assert repeated(torch.tensor(rows)).tolist() == pytest.approx([0, 1 / 5, 4 / 5])


def test_continuations_shorter_than_a_gram_have_no_repetition(tiny):
    figures = generation_figures(student_of(tiny), windows_of(tiny), prompts=2, prompt_tokens=4, new_tokens=3)
    assert all(row.repeated is None for row in figures.texts.values())


def test_what_cannot_be_done_is_refused(tiny):
    student, windows = student_of(tiny), windows_of(tiny)
    for name, value in (("prompts", 0), ("prompt_tokens", 1), ("new_tokens", 0)):
        with pytest.raises(DoflaError, match=f"{name}: {value}"):
            generation_figures(student, windows, **{**SIZES, name: value})
    with pytest.raises(DoflaError, match="no window has"):
        generation_figures(student, windows, prompt_tokens=PROMPT, new_tokens=NEW + 4)
    with pytest.raises(DoflaError, match="256 positions"):
        generation_figures(student, windows, prompt_tokens=200, new_tokens=57)
    with pytest.raises(DoflaError, match="BertModel"):
        generation_figures(student_of(tiny, "bert"), windows, **SIZES)
