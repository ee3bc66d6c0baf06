"""The hub's rows become items; no network is needed to know how."""

from __future__ import annotations

import datasets
import pytest

from dofla.errors import DoflaError
from dofla.tasks import KNOWN, STYLES
from dofla.tasks.hub import HUB, hub_task

ROWS = {
    "piqa": {"goal": "Open a jar", "sol1": "Turn the lid.", "sol2": "Shake it.", "label": 0},
    "logiqa": {"context": "All A are B.", "question": "Which?", "options": ["x", "y", "z", "w"], "label": " c"},
    "arc_easy": {
        "id": "Q1",
        "question": "What melts?",
        "choices": {"text": ["ice", "stone"], "label": ["1", "2"]},
        "answerKey": "2",
    },
    "winogrande": {"sentence": "Ann thanked Sue as _ helped.", "option1": "Ann", "option2": "Sue", "answer": "2"},
    "wsc273": {
        "text": "The cat saw its owner as his door opened.",
        "pronoun": "his",
        "pronoun_loc": 25,
        "options": ["The cat", "The owner"],
        "label": 1,
    },
    "mmlu": {"question": " 1 + 1? ", "subject": "algebra", "choices": ["1", "2", "3", "4"], "answer": 1},
}
ROWS["arc_challenge"] = ROWS["arc_easy"]
FIRST_AND_ANSWER = {
    "piqa": ("Question: Open a jar\nAnswer:", " Turn the lid."),
    "logiqa": ("Passage: All A are B.\nQuestion: Which?\nChoices:\nA. x\nB. y\nC. z\nD. w\nAnswer:", " z"),
    "arc_easy": ("Question: What melts?\nAnswer:", " stone"),
    "arc_challenge": ("Question: What melts?\nAnswer:", " stone"),
    "winogrande": ("Ann thanked Sue as Sue", " helped."),
    "wsc273": ("The cat saw its owner as the owner's", " door opened."),
    "mmlu": (
        "The following are multiple choice questions (with answers) about algebra.\n\n"
        "1 + 1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:",
        " B",
    ),
}


def test_every_known_task_is_on_the_hub():
    assert HUB.keys() == KNOWN.keys() == ROWS.keys()


@pytest.mark.parametrize("name", sorted(HUB))
def test_a_row_becomes_an_item_that_asks_what_the_harness_asks(name, monkeypatch):
    asked = []

    def load_dataset(path, config, split):
        asked.append((path, config, split))
        return [ROWS[name]]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = hub_task(name)
    assert asked == [(HUB[name].path, HUB[name].config, HUB[name].splits["test"])]
    request = STYLES[task.style](task.items[0])[task.items[0].answer]
    assert (request.context, request.continuation) == FIRST_AND_ANSWER[name]


def test_what_the_hub_does_not_have_or_give_is_named(monkeypatch):
    def fail(*args, **kwargs):
        raise ConnectionError("no way\nto the hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DoflaError, match=r"cannot load task piqa \(baber/piqa\) from the hub: no way; give a JSONL"):
        hub_task("piqa")
    with pytest.raises(DoflaError, match="task wsc273 has no train split"):
        hub_task("wsc273", "train")
    with pytest.raises(DoflaError, match="unknown task 'boolq': choose one of piqa"):
        hub_task("boolq")
