"""The demo's tasks: made the same way every time, answerable from their text, and solved by the bundled teacher."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import dofla
from dofla import DoflaError
from dofla.integration.sites import attention_sites
from dofla.runs.demo import teacher_path
from dofla.runs.demo.tasks import RECALL_DISTANCES, demo_tasks
from dofla.tasks import score

COUNT = 16


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(teacher_path())


@pytest.fixture(scope="module")
def teacher():
    return AutoModelForCausalLM.from_pretrained(teacher_path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tasks(teacher, tokenizer):
    return {task.name: task for task in demo_tasks(teacher, tokenizer, COUNT)}


def test_five_tasks_of_four_choices(tasks, tokenizer):
    assert list(tasks) == [*RECALL_DISTANCES, "continuation", "order"]
    for task in tasks.values():
        assert len(task.items) == COUNT
        assert len({item.answer for item in task.items}) > 1
        for item in task.items:
            assert len(set(item.choices)) == 4
            assert item.question.startswith(tokenizer.bos_token)


def test_recall_asks_for_a_villager_of_the_document(tasks, tokenizer):
    for name, distance in RECALL_DISTANCES.items():
        for item in tasks[name].items:
            assert all(f" {choice}." in item.question for choice in item.choices)
            trade = item.question.split()[-1]
            before = item.question.partition(f"{trade} {item.choices[item.answer]}.")[0]
            told = len(tokenizer.encode(item.question)) - len(tokenizer.encode(before))
            assert abs(told - distance) < 30


def test_the_wrong_orders_hold_the_right_words(tasks):
    for item in tasks["order"].items:
        assert len({tuple(sorted(choice.split())) for choice in item.choices}) == 1


@pytest.mark.slow
def test_the_teacher_is_well_above_chance(tasks, teacher, tokenizer):
    found = score(teacher, tokenizer, list(tasks.values()))
    accuracy = {name: scores.metrics["acc"].value for name, scores in zip(tasks, found, strict=True)}
    print(accuracy)
    assert min(accuracy[name] for name in (*RECALL_DISTANCES, "order")) >= 0.9
    assert accuracy["continuation"] >= 0.3


@pytest.mark.slow
def test_a_seed_fixes_the_tasks_and_training_has_others(teacher, tokenizer, tasks):
    from dofla import LayerPlan, Plan

    sites = attention_sites(teacher).values()
    plan = Plan([LayerPlan(site.name, site.kv_heads, site.head_dim, site.value_dim, 8) for site in sites])
    few = demo_tasks(teacher, tokenizer, 6)
    other = demo_tasks(teacher, tokenizer, 6, split="train")
    dofla.linearize(teacher, plan)
    try:
        assert demo_tasks(teacher, tokenizer, 6) == few  # a student makes what its teacher did
    finally:
        dofla.restore(teacher)
    for task, theirs in zip(few, other, strict=True):
        assert not {item.question for item in task.items} & {item.question for item in theirs.items}


def test_bad_requests(teacher, tokenizer):
    with pytest.raises(DoflaError, match=r"'validation'.*test or train"):
        demo_tasks(teacher, tokenizer, 4, split="validation")
    with pytest.raises(DoflaError, match="too few different"):
        demo_tasks(teacher, tokenizer, 2)
