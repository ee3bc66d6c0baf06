"""Passkey prompts, and figures against full forward passes."""

from __future__ import annotations

import re
from dataclasses import astuple

import pytest
import torch
from students import reader_of

import dofla
from dofla.errors import DoflaError
from dofla.evaluation import passkey_figures
from dofla.evaluation.passkey import FILLER, PasskeyText


@pytest.mark.parametrize("length", [80, 300, 1000])
@pytest.mark.parametrize("depth", [0, 0.25, 0.5, 1])
def test_the_key_stands_where_it_was_asked_for(tokenizer, length, depth):
    longest = max(len(tokenizer.encode(sentence, add_special_tokens=False)) for sentence in FILLER)
    prompts = PasskeyText(tokenizer).prompts(length, depth, 3, seed=0)
    assert len({len(prompt.ids) for prompt in prompts}) == 1
    for prompt in prompts:
        assert length - longest <= len(prompt.ids) <= length
        text = tokenizer.decode(prompt.ids)
        (key,) = set(re.findall(r"\d+", text))
        assert text.count(f"The pass key is {key}. Remember it. {key} is the pass key.") == 1
        assert text.endswith("What is the pass key? The pass key is")
        assert tokenizer.decode(prompt.choices[0]) == f" {key}"
        before, after = (part.count(".") for part in text.split(f"The pass key is {key}. Remember it. {key} is"))
        # Two sentences open the text, and the key's own ends behind the split.
        before, after = before - 2, after - 1
        assert before == round(depth * (before + after))


@pytest.mark.parametrize("digits", [2, 5])
def test_keys_to_choose_from_differ_and_have_as_many_tokens(tokenizer, digits):
    for prompt in PasskeyText(tokenizer, choices=6, digits=digits).prompts(100, 0.5, 4, seed=0):
        assert len(prompt.choices) == len({tuple(key) for key in prompt.choices}) == 6
        assert len({len(key) for key in prompt.choices}) == 1
        assert all(re.fullmatch(rf" \d{{{digits}}}", tokenizer.decode(key)) for key in prompt.choices)


def test_prompts_are_those_of_the_seed(tokenizer):
    text = PasskeyText(tokenizer)
    assert text.prompts(100, 0.5, 2, seed=1) == text.prompts(100, 0.5, 2, seed=1)
    assert text.prompts(100, 0.5, 2, seed=1) != text.prompts(100, 0.5, 2, seed=2)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_figures_are_those_of_whole_texts_read_from_the_start(tiny, tokenizer, kind, batch_size):
    student, sizes = reader_of(tiny, kind), {"lengths": (70,), "depths": (0.0, 1.0), "count": 3, "choices": 3}
    records = passkey_figures(student, tokenizer, batch_size=batch_size, seed=4, **sizes).records
    assert [(row.length, row.depth, row.n) for row in records] == [(70, 0.0, 3), (70, 1.0, 3)]
    for row in records:
        prompts = PasskeyText(tokenizer, choices=3).prompts(70, row.depth, 3, seed=4)
        expected = {"teacher": [], "student": []}
        for prompt in prompts:
            with dofla.softmax(student):
                expected["teacher"].append(by_hand(student, prompt))
            expected["student"].append(by_hand(student, prompt))
        assert row.chance == pytest.approx(1 / 3)
        for who, scores in expected.items():
            means = torch.tensor(scores, dtype=torch.float64).mean(dim=0).tolist()
            assert astuple(getattr(row, who)) == pytest.approx(means, rel=1e-4)


def by_hand(model, prompt):
    ids, keys = torch.tensor([prompt.ids]), torch.tensor(prompt.choices)
    with torch.no_grad():
        logits = model(torch.cat([ids.expand(len(keys), -1), keys], dim=1)).logits[:, ids.shape[1] - 1 : -1].double()
        written = ids
        for _ in range(keys.shape[1]):
            written = torch.cat([written, model(written).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    losses = torch.nn.functional.cross_entropy(logits.mT, keys, reduction="none").mean(dim=1)
    return losses.argmin().item() == 0, losses[0].item(), torch.equal(written[0, ids.shape[1] :], keys[0])


@pytest.mark.parametrize("plan", [{"keep_softmax": True}, {"window": 256}])
def test_a_student_whose_attention_is_exact_finds_what_its_teacher_finds(tiny, tokenizer, plan):
    sizes = {"lengths": (80,), "depths": (0.5,), "count": 3, "batch_size": 3}
    (row,) = passkey_figures(reader_of(tiny, **plan), tokenizer, **sizes).records
    assert astuple(row.student) == pytest.approx(astuple(row.teacher), rel=1e-4)


def test_what_cannot_be_asked_is_refused(tiny, tokenizer):
    student = reader_of(tiny)
    for options, message in (
        ({"lengths": (20,)}, "length 20 is too short .* tokens or more"),
        ({"lengths": (400,)}, "256 positions"),
        ({"depths": (1.5,)}, "depth: 1.5"),
        ({"depths": ()}, "give one depth"),
        ({"count": 0}, "give one length and one prompt"),
        ({"choices": 1}, "choices: 1"),
        ({"digits": 1, "choices": 10}, "digits: 1"),
    ):
        with pytest.raises(DoflaError, match=message):
            passkey_figures(student, tokenizer, **{"lengths": (100,), "count": 1, **options})
