"""Scores against a plain softmax in float64, one forward pass per choice, and the splitting of texts into tokens."""

from __future__ import annotations

import copy
import logging
import sys
from contextlib import nullcontext

import pytest
import torch

import dofla
from dofla import DoflaError
from dofla.integration.positions import positions_of
from dofla.tasks import Item, Request, Task, score
from dofla.tasks.scoring import encode, language_model
from dofla.tasks.styles import STYLES


@torch.no_grad()
def one_by_one(model, tokenizer, task) -> list[list[float]]:
    """Every choice in a row of its own, of words, so that the choice has its own tokens."""
    found = []
    for item in task.items:
        found.append([])
        for context, continuation in STYLES[task.style](item):
            given, asked = tokenizer.encode(context) or [tokenizer.bos_token_id], tokenizer.encode(continuation)
            tokens = (given + asked)[-(positions_of(model) + 1) :]
            logits = model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0, -len(asked) :].double()
            shares = logits.exp() / logits.exp().sum(-1, keepdim=True)
            found[-1].append(sum(float(row[token].log()) for row, token in zip(shares, asked, strict=True)))
    return found


def assert_same(scores, expected):
    for ours, theirs in zip(scores.logprobs, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("style", list(STYLES))
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("who", ["teacher", "student"])
def test_scores_are_plain_log_likelihoods(tiny, words, make_task, family, style, who):
    model = getattr(tiny, family)()
    dofla.linearize(model, tiny.plan(model, 8, window=3, sinks=1))
    task = make_task(style)
    with dofla.softmax(model) if who == "teacher" else nullcontext():
        assert_same(score(model, words, task, batch_size=4), one_by_one(model, words, task))


def test_layers_kept_softmax_are_scored_too(tiny, words, make_task):
    model = tiny.llama()
    plan = tiny.plan(model, 8)
    plan.layers[1].keep_softmax = True
    dofla.linearize(model, plan)
    task = make_task("question")
    assert_same(score(model, words, task), one_by_one(model, words, task))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_long_contexts_lose_their_beginning(tiny, words, make_task, family):
    sizes = {"llama": {"max_position_embeddings": 16}, "gpt2": {"n_positions": 16}}
    model = getattr(tiny, family)(**sizes[family])
    task = make_task("question", longest=40)
    assert max(len(words.encode(STYLES["question"](item)[0].context)) for item in task.items) > 20
    assert_same(score(model, words, task), one_by_one(model, words, task))


def test_items_with_one_context_or_none_and_choices_alike(tiny, words):
    model = tiny.llama()
    items = [
        Item("w1 w2 w3", ("w4", "w4 w5", "w4 w5 w6", "w4"), 0),
        Item("w1 w2 w3", ("w7 w8", "w9"), 1),
        Item("", ("w4 w5", "w6"), 0),
        Item("w1", ("w2", "w3"), 0),
    ]
    task = Task("odd", "plain", items)
    assert_same(score(model, words, task, batch_size=2), one_by_one(model, words, task))


def test_a_blank_in_front_or_behind(tiny, words):
    model = tiny.gpt2()
    task = Task("blanks", "blank", [Item("_ w1 w2 w3", ("w4 w5", "w6"), 0), Item("w1 _ .", ("w4 w5", "w6"), 0)])
    assert_same(score(model, words, task), one_by_one(model, words, task))


def test_progress_counts_items_and_the_mode_is_kept(tiny, words, make_task):
    model = tiny.llama().train()
    calls = []
    score(model, words, make_task(count=7), batch_size=3, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (7, 7)
    assert calls == sorted(calls)
    assert model.training


def test_accuracy_error_and_normalization(words):
    from dofla.tasks import TaskScores

    scores = TaskScores("t", [0, 1, 2], [0, 1, 1], [[-2.0, -3.0], [-1.0, -1.0], [-4.0, -9.0]], [[1, 2], [2, 2], [1, 3]])
    assert scores.chosen() == [0, 0, 0]
    assert scores.chosen("acc_norm") == [1, 0, 1]
    assert scores.accuracy() == pytest.approx(1 / 3)
    assert scores.accuracy("acc_norm") == pytest.approx(1 / 3)
    assert scores.stderr() == pytest.approx((1 / 3 * 2 / 3 / 2) ** 0.5)
    with pytest.raises(DoflaError, match=r"'f1'.*acc_norm"):
        scores.chosen("f1")


def test_spaces_at_the_end_of_a_context_belong_to_the_continuation(tiny, words):
    given, asked = encode(language_model(tiny.llama(), words), Request("w1 w2  ", "w3"), "t")
    assert (words.decode(given), words.decode(asked).strip()) == ("w1 w2", "w3")


@pytest.mark.parametrize(("request_", "length"), [(("", "w3 w4"), 2), (("", "<end> w4"), 1), (("  ", "w3 w4"), 2)])
def test_an_empty_context_is_the_start_token(tiny, words, request_, length):
    given, asked = encode(language_model(tiny.llama(), words), Request(*request_), "t")
    assert (given, len(asked)) == ([words.bos_token_id], length)


def test_nothing_is_said_and_the_tokenizer_is_left_alone(tiny, words, make_task, caplog):
    with caplog.at_level(logging.DEBUG):
        score(tiny.llama(max_position_embeddings=16), words, make_task(longest=40))
    assert not [record for record in caplog.records if record.name.startswith("lm_eval")]
    assert words.pad_token is None


def test_without_the_harness_the_error_says_how_to_get_it(tiny, words, make_task, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    with pytest.raises(DoflaError, match=r"dofla\[eval\]"):
        score(tiny.llama(), words, make_task())


def test_what_cannot_be_scored_is_refused(tiny, words):
    with pytest.raises(DoflaError, match=r"task t: .*no tokens"):
        score(tiny.llama(), words, Task("t", "plain", [Item("w1", (" ", "w2"), 0)]))
    with pytest.raises(DoflaError, match=r"task t: .*20 tokens.*reads 16"):
        score(tiny.llama(max_position_embeddings=16), words, Task("t", "plain", [Item("w1", ("w1 " * 20, "w2"), 0)]))
    with pytest.raises(DoflaError, match="BertModel cannot score"):
        score(tiny.bert(), words, Task("t", "plain", [Item("w1", ("w1", "w2"), 0)]))
    nameless = copy.deepcopy(words)
    nameless.bos_token = nameless.eos_token = None
    with pytest.raises(DoflaError, match="no bos or eos"):
        score(tiny.llama(), nameless, Task("t", "plain", [Item("", ("w1", "w2"), 0)]))
    broken = tiny.llama()
    torch.nn.init.constant_(broken.lm_head.weight, float("nan"))
    with pytest.raises(DoflaError, match="NaN"):
        score(broken, words, Task("t", "plain", [Item("w1", ("w1", "w2"), 0)]))
