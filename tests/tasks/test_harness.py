"""Tasks written down for lm-evaluation-harness ask what `score` asks, and it finds the same."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
import yaml

import dofla
from dofla import DoflaError
from dofla.tasks import Item, Task, harness_folder, run_harness, score


@pytest.fixture(scope="module")
def student(tiny):
    model = tiny.llama()
    return dofla.linearize(model, tiny.plan(model, 8, window=2))


@pytest.fixture(scope="module")
def tasks(make_task):
    return {style: make_task(style, count=8) for style in ("question", "passage", "letters", "blank", "plain")}


@pytest.fixture(scope="module")
def folder(tasks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness")
    for task in tasks.values():
        harness_folder(task, folder)
    return folder


@pytest.fixture(scope="module")
def found(student, words, tasks, folder):
    pairs = run_harness(student, words, [task.name for task in tasks.values()], include=folder, batch_size=4)
    return dict(zip(tasks, pairs, strict=True))


@pytest.mark.parametrize("style", ["question", "passage", "letters", "blank", "plain"])
def test_the_harness_finds_the_same_in_a_file(student, words, tasks, found, style):
    task = tasks[style]
    with dofla.softmax(student):
        teacher = score(student, words, task)
    for ours, theirs in ((teacher, found[style].teacher), (score(student, words, task), found[style].student)):
        assert theirs.task == task.name
        assert ours.answers == theirs.answers
        assert ours.lengths == theirs.lengths
        for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert mine == pytest.approx(other, abs=1e-4)
        for metric in ("acc", "acc_norm"):
            assert ours.accuracy(metric) == theirs.accuracy(metric)
            assert ours.stderr(metric) == theirs.stderr(metric)


def test_the_harness_itself_reports_the_same_accuracy(student, words, tasks, folder, found):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    names = [task.name for task in tasks.values()]
    state = torch.random.get_rng_state()
    with dofla.softmax(student):
        report = simple_evaluate(
            HFLM(pretrained=student, tokenizer=copy.deepcopy(words), batch_size=4),
            tasks=names,
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        )["results"]
    torch.random.set_rng_state(state)
    for style, pair in found.items():
        row = report[tasks[style].name]
        assert row["acc,none"] == pytest.approx(pair.teacher.accuracy())
        assert row["acc_stderr,none"] == pytest.approx(pair.teacher.stderr())
        if style != "blank":
            assert row["acc_norm,none"] == pytest.approx(pair.teacher.accuracy("acc_norm"))


def test_teacher_and_student_differ_and_the_tokenizer_is_left_alone(student, words, found):
    assert any(pair.teacher.logprobs != pair.student.logprobs for pair in found.values())
    assert words.pad_token is None
    assert student.config._attn_implementation == "dofla"


def test_a_part_of_a_task_is_its_beginning(student, words, tasks, folder, found):
    (pair,) = run_harness(student, words, [tasks["question"].name], include=folder, limit=3)
    assert pair.student.answers == found["question"].student.answers[:3]


def test_a_task_without_its_data_names_the_way_out(student, words, tmp_path):
    path = harness_folder(Task("lost", "plain", [Item("w1", ("w2", "w3"), 0)]), tmp_path)
    config = yaml.safe_load(path.read_text())
    config["dataset_path"], config["dataset_kwargs"] = "nobody/nothing", {}
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(DoflaError, match=r"task 'lost' cannot be loaded.*--tasks lost.jsonl") as raised:
        run_harness(student, words, ["lost"], include=tmp_path)
    assert "\n" not in str(raised.value)


def test_an_unknown_task_is_named(student, words, monkeypatch):
    from lm_eval import tasks

    # Listing the harness's own tasks takes seconds, and any list will do here.
    empty = tasks.TaskManager(include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", lambda **_: empty)
    with pytest.raises(DoflaError, match=r"no task 'no_such_task'.*local task file"):
        run_harness(student, words, ["no_such_task"])


def test_tasks_of_another_kind_are_refused(student, words, tmp_path):
    path = harness_folder(Task("talk", "plain", [Item("w1", ("w2", "w3"), 0)]), tmp_path)
    config = yaml.safe_load(path.read_text())
    config |= {"output_type": "generate_until", "metric_list": [{"metric": "exact_match"}]}
    config["generation_kwargs"] = {"until": ["."]}
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(DoflaError, match="'talk' is generate_until"):
        run_harness(student, words, ["talk"], include=tmp_path)


def test_without_the_harness_the_error_says_how_to_get_it(student, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(DoflaError, match=r"dofla\[eval\]"):
        run_harness(student, words, ["piqa"])
