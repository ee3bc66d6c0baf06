"""Scores against a plain softmax in float64, one forward pass per choice; generation; what is refused."""

import copy
import json
import logging
import sys

import pytest
import torch
import yaml
from students import keep_softmax, student_of

import dofla
from dofla import DoflaError
from dofla.integration.converted import Converted
from dofla.integration.positions import positions_of
from dofla.tasks import STYLES, Item, Task, evaluate_tasks, score


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


def assert_right(model, tokenizer, task, **options):
    """Log-likelihoods are those of :func:`one_by_one`, and accuracies follow from them."""
    (scores,) = score(model, tokenizer, [task], **options)
    expected = one_by_one(model, tokenizer, task)
    for ours, theirs in zip(scores.logprobs, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    lengths = [[len(request.continuation) - 1 for request in STYLES[task.style](item)] for item in task.items]
    norms = [[x / max(n, 1) for x, n in zip(*pair, strict=True)] for pair in zip(scores.logprobs, lengths, strict=True)]
    assert (scores.task, scores.items) == (task.name, len(task.items))
    assert scores.metrics.keys() == ({"acc"} if task.style == "blank" else {"acc", "acc_norm"})
    for name, metric in scores.metrics.items():
        ranked = norms if name == "acc_norm" else scores.logprobs
        values = [values.index(max(values)) == item.answer for values, item in zip(ranked, task.items, strict=True)]
        share, count = sum(values) / len(values), len(values)
        assert metric.values == values
        assert metric.value == pytest.approx(share)
        if count > 1:
            assert metric.stderr == pytest.approx((share * (1 - share) / (count - 1)) ** 0.5)


@pytest.mark.parametrize("style", list(STYLES))
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_scores_are_plain_log_likelihoods(tiny, words, make_task, family, style):
    model = student_of(tiny, family, features=8, window=3, sinks=1)
    assert_right(model, words, make_task(style, count=7), batch_size=4)
    with dofla.original(model):
        assert_right(model, words, make_task(style, count=4), batch_size=4)


def test_layers_kept_softmax_are_scored_too(tiny, words, make_task):
    task, found = make_task("question"), []
    for kept in ((), (1,), (0, 1)):
        model = tiny.llama()
        dofla.linear.linearize(model, keep_softmax(tiny.plan(model, 8), *kept))
        assert Converted.of(model).plan.layers[1].kind == ("softmax" if kept else "features")
        assert_right(model, words, task)
        found.append(score(model, words, [task])[0].logprobs)
    assert found[0] != found[1] != found[2]  # what stays softmax counts
    assert found[2] == score(tiny.llama(), words, [task])[0].logprobs


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_long_contexts_lose_their_beginning(tiny, words, make_task, family):
    sizes = {"llama": {"max_position_embeddings": 16}, "gpt2": {"n_positions": 16}}
    task = make_task("question", longest=40)
    assert max(len(words.encode(STYLES["question"](item)[0].context)) for item in task.items) > 20
    assert_right(getattr(tiny, family)(**sizes[family]), words, task)


@pytest.mark.parametrize(
    ("style", "items"),
    [
        ("plain", [("w1 w2 w3", ("w4", "w4 w5", "w4 w5 w6", "w4")), ("w1 w2 w3", ("w7 w8", "w9"))]),
        ("plain", [("", ("w4 w5", "w6")), ("w1", ("w2", "w3")), ("  ", ("w2", "w3"))]),
        ("blank", [("_ w1 w2 w3", ("w4 w5", "w6")), ("w1 _ .", ("w4 w5", "w6"))]),
    ],
)
def test_odd_items(tiny, words, style, items):
    assert_right(tiny.llama(), words, Task("odd", style, [Item(*item, answer=0) for item in items]), batch_size=2)


def test_nothing_is_said_and_tokenizer_and_mode_are_left_alone(tiny, words, make_task, caplog, capfd):
    model = tiny.llama(max_position_embeddings=16).train()
    with caplog.at_level(logging.DEBUG):
        score(model, words, [make_task(longest=40)])
    assert not [record for record in caplog.records if record.name.startswith("lm_eval")]
    assert capfd.readouterr() == ("", "")
    assert words.pad_token is None
    assert model.training


def test_what_cannot_be_scored_is_refused(tiny, words):
    def refused(match, model, tokenizer=words, choices=("w1", "w2"), question="w1"):
        with pytest.raises(DoflaError, match=match):
            score(model, tokenizer, [Task("t", "plain", [Item(question, choices, 0)])])

    refused(r"task t: .* has 0 tokens of its own: give one of 1 to 256", tiny.llama(), choices=(" ", "w2"))
    refused(r"task t: .* has 20 tokens.* 1 to 16", tiny.llama(max_position_embeddings=16), choices=("w1 " * 20, "w2"))
    refused("BertModel cannot do tasks", tiny.bert())
    nameless = copy.deepcopy(words)
    nameless.bos_token = nameless.eos_token = None
    refused("no bos or eos", tiny.llama(), nameless, question="")
    broken = tiny.llama()
    torch.nn.init.constant_(broken.lm_head.weight, float("nan"))
    refused("task t: a log-likelihood is NaN", broken)


@pytest.mark.parametrize("module", ["lm_eval.models.huggingface", "lm_eval.tasks"])
def test_without_the_harness_the_error_says_how_to_get_it(tiny, words, make_task, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DoflaError, match=r"dofla\[eval\]"):
        score(tiny.llama(), words, [make_task()])


@pytest.fixture
def talk(tmp_path):
    """A task of the harness that is answered in words, in a folder; its data; and its YAML, with what is changed."""
    lines = [{"text": " ".join(f"w{n + k}" for k in range(1 + n % 3)), "answer": f"w{n}"} for n in range(5)]
    (tmp_path / "talk.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def write(**changes):
        first = {"function": "take_first"}
        config = {
            "task": "talk",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": str(tmp_path / "talk.jsonl"), "cache_dir": str(tmp_path / "cache")},
            "test_split": "train",
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["."], "max_gen_toks": 6},
            "metric_list": [{"metric": "exact_match"}, {"metric": "bleu"}],
            "filter_list": [
                {"name": "whole", "filter": [first]},
                {"name": "first", "filter": [{"function": "regex", "regex_pattern": r"(w\d+)"}, first]},
            ],
        }
        (tmp_path / "talk.yaml").write_text(yaml.safe_dump(config | changes))
        return tmp_path

    return write, lines


def test_generated_answers_are_those_of_generate(tiny, words, talk):
    write, lines = talk
    student = student_of(tiny, "gpt2", features=4, window=1)

    def first(model, text):
        ids = torch.tensor([words.encode(text)])
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        written = model.generate(ids, max_new_tokens=6, **options)
        text = words.decode(written[0, ids.shape[1] :], skip_special_tokens=True).partition(".")[0]
        return next((word for word in text.split() if word.startswith("w")), "[invalid]")  # as the harness says

    found = {"model": [first(student, line["text"]) for line in lines]}
    with dofla.original(student):
        found["original"] = [first(student, line["text"]) for line in lines]
    assert found["model"] != found["original"]
    for line, answer in zip(lines, found["model"], strict=True):
        line["answer"] = answer
    folder = write()
    (folder / "talk.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (task,) = evaluate_tasks(student, words, ["talk"], include_path=folder, batch_size=3).tasks
    assert (task.task, task.items, task.agreement) == ("talk", 5, None)
    assert task.metrics.keys() == {f"{name}, {kind}" for name in ("exact_match", "bleu") for kind in ("whole", "first")}
    row = task.metrics["exact_match, first"]
    for who in ("original", "model"):
        right = torch.tensor([a == line["answer"] for a, line in zip(found[who], lines, strict=True)]).double()
        assert getattr(row, who) == pytest.approx(right.mean().item())
        assert getattr(row, f"{who}_stderr") == pytest.approx((right.std() / 5**0.5).item())
    assert row.difference == row.model - row.original
    assert row.difference_stderr is not None
    assert task.metrics["bleu, whole"].original_stderr is not None
    assert task.metrics["bleu, whole"].difference_stderr is None
    assert student.config._attn_implementation == "dofla"


def test_tasks_of_the_harness_stand_beside_local_ones_and_are_cut(tiny, words, talk, make_task):
    student, folder = student_of(tiny, features=8), talk[0]()
    mean = {"metric": "exact_match", "filter_list": ["first"], "weight_by_size": True}
    group = {"group": "talks", "task": ["talk"], "aggregate_metric_list": [mean]}
    (folder / "talks.yaml").write_text(yaml.safe_dump(group))
    found = evaluate_tasks(student, words, [make_task(), "talks"], include_path=folder, limit=2)
    assert [(task.task, task.items) for task in found.tasks] == [("made_question", 2), ("talk", 2), ("talks", 2)]
    (row,) = found.tasks[2].metrics.items()
    assert row == ("exact_match, first", found.tasks[1].metrics["exact_match, first"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset_path": "nobody/nothing", "dataset_kwargs": {}}, r"'talk' cannot be loaded.*--tasks talk.jsonl"),
        ({"generation_kwargs": {"max_gen_toks": 256}}, r"tasks talk: .*256"),
        ({"unsafe_code": True}, r"tasks talk: .*unsafe"),
    ],
)
def test_what_the_harness_refuses_is_one_line(tiny, words, talk, changes, message):
    with pytest.raises(DoflaError, match=message):
        evaluate_tasks(student_of(tiny), words, ["talk"], include_path=talk[0](**changes))


def test_an_unknown_task_is_named(tiny, words, monkeypatch):
    from lm_eval import tasks

    # Listing the harness's own tasks takes seconds, and any list will do here.
    empty = tasks.TaskManager(include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", lambda **_: empty)
    with pytest.raises(DoflaError, match=r"no task 'no_such_task'.*JSONL file"):
        evaluate_tasks(tiny.llama(), words, ["no_such_task"])
