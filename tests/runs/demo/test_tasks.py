"""The bundled tasks: answerable from their text, and solved by the bundled model."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from dofla.runs.demo import TASKS, model_path
from dofla.tasks import load_task, score

DISTANCES = {"recall_near": 60, "recall_mid": 150, "recall_far": 350}


@pytest.fixture(scope="module", params=["test", "train"])
def tasks(request):
    return {task.name: task for task in map(load_task, TASKS.glob(f"*-{request.param}.jsonl.gz"))}


def test_five_tasks_of_four_choices(tasks, tokenizer):
    assert tasks.keys() == {*DISTANCES, "continuation", "order"}
    for task in tasks.values():
        assert len(task.items) == 100
        assert len({item.answer for item in task.items}) == 4
        for item in task.items:
            assert len(set(item.choices)) == 4
            assert item.question.startswith(tokenizer.bos_token)


def test_recall_asks_for_a_villager_of_the_document(tasks, tokenizer):
    for name, distance in DISTANCES.items():
        for item in tasks[name].items:
            assert all(f" {choice}." in item.question for choice in item.choices)
            trade = item.question.split()[-1]
            before = item.question.partition(f"{trade} {item.choices[item.answer]}.")[0]
            told = len(tokenizer.encode(item.question)) - len(tokenizer.encode(before))
            assert abs(told - distance) < 30


def test_the_wrong_orders_hold_the_right_words(tasks):
    for item in tasks["order"].items:
        assert len({tuple(sorted(choice.split())) for choice in item.choices}) == 1


def test_no_item_is_in_both_splits():
    for path in TASKS.glob("*-test.jsonl.gz"):
        other = load_task(path.with_name(path.name.replace("-test", "-train")))
        assert not {item.question for item in load_task(path).items} & {item.question for item in other.items}


@pytest.mark.slow
def test_the_model_is_well_above_chance(tasks, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()
    found = score(model, tokenizer, [task.take(32) for task in tasks.values()])
    accuracy = {name: scores.metrics["acc"].value for name, scores in zip(tasks, found, strict=True)}
    assert min(accuracy[name] for name in (*DISTANCES, "order")) >= 0.9
    assert accuracy["continuation"] >= 0.3
