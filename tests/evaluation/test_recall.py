"""Recall prompts and the figures of those who answer them."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch
from students import reader_of

import dofla
from dofla.data.words import pieces
from dofla.errors import DoflaError
from dofla.evaluation import recall_figures
from dofla.evaluation.recall import DEPTHS, Question, RecallPrompt, WordPairs
from dofla.integration.checkpoint import load_model
from dofla.runs.demo import teacher_path
from dofla.runs.demo.recall import Villagers

# --- the prompts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [16, 60, 200])
def test_word_pairs_are_told_once_and_asked_for_by_their_keys(tokenizer, length):
    for prompt in WordPairs(tokenizer).prompts(length, 5, seed=0):
        text = tokenizer.decode(prompt.ids)
        assert len(prompt.ids) <= length < len(prompt.ids) + 10
        values = prompt.questions[0].choices
        lines = [line.split() for line in text.split("\n")]
        told = [tuple(line[1:]) for line in lines[: len(values)]]
        keys, words = [key for key, _ in told], [value for _, value in told]
        assert len(set(keys + words)) == 2 * len(values)
        assert words == [tokenizer.decode([value]).strip() for value in values]
        assert len({question.answer for question in prompt.questions}) == len(prompt.questions)
        asked = [line[1] for line in lines[len(values) :]]
        for key, question in zip(asked, prompt.questions, strict=True):
            place = keys.index(key)
            assert question.answer == values[place]
            assert question.depth == place / (len(values) - 1)
            # The question ends with the colon behind its key, and its answer follows unless it is the last.
            assert tokenizer.decode(prompt.ids[: question.position + 1]).endswith(f"- {key}")
            assert prompt.ids[question.position + 1 :][:1] in ([question.answer], [])
        assert prompt.questions[-1].position == len(prompt.ids) - 1


def test_prompts_are_those_of_the_seed(tokenizer):
    for source in (WordPairs(tokenizer), Villagers(tokenizer)):
        assert source.prompts(64, 3, seed=1) == source.prompts(64, 3, seed=1)
        assert source.prompts(64, 3, seed=1) != source.prompts(64, 3, seed=2)


@pytest.mark.parametrize("length", [12, 100_000])
def test_lengths_that_do_not_suit_word_pairs_are_refused(tokenizer, length):
    with pytest.raises(DoflaError, match=f"length {length} .* give 15 to "):
        WordPairs(tokenizer).prompts(length, 1, seed=0)


def test_a_vocabulary_without_words_is_refused():
    class Letters:
        def get_vocab(self):
            return {"a": 0, "b": 1}

    with pytest.raises(DoflaError, match="0 words of one token"):
        WordPairs(Letters())


def test_villagers_are_chosen_among_those_introduced(tokenizer):
    for prompt in Villagers(tokenizer).prompts(80, 10, seed=0):
        (question,) = prompt.questions
        names = [tokenizer.decode([choice]).strip() for choice in question.choices]
        words = tokenizer.decode(prompt.ids).replace(".", "").replace(",", "").split()
        assert [word for word in words if word in names] == names
        trade = words[-1]
        place = names.index(tokenizer.decode([question.answer]).strip())
        assert words[words.index(trade) + 1] == names[place]
        assert question.depth == place / (len(names) - 1)
        assert question.position == len(prompt.ids) - 1


def test_pieces_are_the_tokens_inside_a_sentence(tokenizer):
    assert tokenizer.decode(pieces(tokenizer, " river")) == " river"
    assert tokenizer.decode(pieces(tokenizer, ":\n")) == ":\n"


# --- the figures ------------------------------------------------------------------------------------------------------


class Fixed:
    """Three prompts of different lengths."""

    name = "fixed"

    def prompts(self, length, count, seed):
        generator = torch.Generator().manual_seed(seed)
        out = []
        for n in range(count):
            ids = torch.randint(64, (length + 3 * n,), generator=generator).tolist()
            places = ((length // 2, 0.1), (len(ids) - 1, 0.9))
            out.append(RecallPrompt(ids, [Question(p, 5 + n, (3, 5 + n, 9, 11 + n), depth) for p, depth in places]))
        return out


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_figures_are_those_of_prompts_read_one_by_one(tiny, kind, batch_size):
    student = reader_of(tiny, kind)
    found = recall_figures(student, Fixed(), lengths=(8, 12), count=3, batch_size=batch_size, seed=2)
    assert found.text == Fixed.name
    records = found.records
    assert [(row.length, row.depth, row.n) for row in records] == [
        (8, 0.0, 3), (8, 1.0, 3), (12, 0.0, 3), (12, 1.0, 3)
    ]  # fmt: skip
    for row in records:
        prompts = Fixed().prompts(row.length, 3, 2)
        expected = {"teacher": [], "student": []}
        for prompt in prompts:
            question = prompt.questions[0 if row.depth == 0 else 1]
            with torch.no_grad():
                logits = {"student": student(torch.tensor([prompt.ids])).logits[0, question.position]}
                with dofla.softmax(student):
                    logits["teacher"] = student(torch.tensor([prompt.ids])).logits[0, question.position]
            for who, x in logits.items():
                among = max(question.choices, key=lambda choice, x=x: x[choice].item())
                loss = torch.nn.functional.cross_entropy(x.double(), torch.tensor(question.answer)).item()
                expected[who].append((among == question.answer, loss, int(x.argmax()) == question.answer))
        assert row.chance == 0.25
        for who, scores in expected.items():
            means = torch.tensor(scores, dtype=torch.float64).mean(dim=0).tolist()
            assert astuple(getattr(row, who)) == pytest.approx(means, rel=1e-4)


def test_the_demos_teacher_knows_its_villagers_and_a_poor_student_does_not(tokenizer, tiny):
    model = load_model(teacher_path(), dtype=torch.float32)
    dofla.linearize(model, tiny.plan(model))
    records = recall_figures(model, Villagers(tokenizer), lengths=(60,), count=8, batch_size=8).records
    assert all(row.teacher.accuracy == row.teacher.greedy == 1 for row in records)
    assert all(row.teacher.loss < 0.5 < row.student.loss for row in records)
    assert sum(row.n for row in records) == 8
    assert {row.depth for row in records} <= set(DEPTHS)


@pytest.mark.parametrize("plan", [{"keep_softmax": True}, {"window": 256}])
def test_a_student_whose_attention_is_exact_recalls_as_its_teacher(tiny, tokenizer, plan):
    for row in recall_figures(
        reader_of(tiny, **plan), WordPairs(tokenizer), lengths=(60,), count=4, batch_size=4
    ).records:
        assert astuple(row.student) == pytest.approx(astuple(row.teacher), rel=1e-4)


def test_what_cannot_be_asked_is_refused(tiny, tokenizer):
    student, source = reader_of(tiny), WordPairs(tokenizer)
    for options in ({"lengths": ()}, {"count": 0}):
        with pytest.raises(DoflaError, match="give one length and one prompt"):
            recall_figures(student, source, **options)
    with pytest.raises(DoflaError, match="256 positions"):
        recall_figures(student, source, lengths=(400,), count=1)
    with pytest.raises(DoflaError, match="BertModel"):
        recall_figures(reader_of(tiny, "bert"), source, lengths=(60,), count=1)
    with pytest.raises(DoflaError, match="batch_size is 0"):
        recall_figures(student, source, lengths=(60,), count=1, batch_size=0)
