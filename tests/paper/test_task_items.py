"""The hub's rows become items; no network is needed to know how."""

import json

import datasets
import pytest

from dofla.errors import DoflaError
from dofla.paper.items import HUB, hub_task, train_and_test
from dofla.tasks import KNOWN, STYLES

MELTS = {"text": ["ice", "stone"], "label": ["1", "2"]}
WHOSE = {"pronoun": "his", "pronoun_loc": 25, "options": ["The cat", "The owner"], "label": 1}
ROWS = {
    "piqa": {"goal": "Open a jar", "sol1": "Turn the lid.", "sol2": "Shake it.", "label": 0},
    "logiqa": {"context": "All A are B.", "question": "Which?", "options": ["x", "y", "z", "w"], "label": " c"},
    "arc_easy": {"id": "Q1", "question": "What melts?", "choices": MELTS, "answerKey": "2"},
    "winogrande": {"sentence": "Ann thanked Sue as _ helped.", "option1": "Ann", "option2": "Sue", "answer": "2"},
    "wsc273": {"text": "The cat saw its owner as his door opened.", **WHOSE},
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


def test_what_the_hub_does_not_have_or_give_is_named(monkeypatch, tmp_path):
    def fail(*args, **kwargs):
        raise ConnectionError("no way\nto the hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    for name, source, message in [
        ("piqa", "hub", r"piqa \(baber/piqa\) from the hub: no way; give a folder"),
        ("sums", str(tmp_path), "has no sums-train.jsonl or sums-test.jsonl"),
        ("one", str(written(tmp_path / "one-test.jsonl", 1).parent), "task one: 1 items are too few"),
    ]:
        with pytest.raises(DoflaError, match=message):
            train_and_test(name, source)
    with pytest.raises(DoflaError, match=r"unknown task 'sums': choose one of piqa"):
        hub_task("sums")


def written(path, count: int):
    lines = [json.dumps({"question": f"w{n} _", "choices": ["a", "b"], "answer": 0, "id": n}) for n in range(count)]
    path.write_text("\n".join(lines))
    return path


def test_items_to_train_and_to_test_on(tmp_path):
    for stem, count in (("both-train", 24), ("both-test", 12), ("learn-train", 40), ("ask-test", 40)):
        written(tmp_path / f"{stem}.jsonl", count)
    train, test = train_and_test("both", str(tmp_path))
    assert [(part.name, part.style, len(part.items)) for part in (train, test)] == [
        ("both", "blank", 24),
        ("both", "blank", 12),
    ]
    splits = [train_and_test(name, str(tmp_path)) for name in ("learn", "ask")]
    for train, test in splits:
        assert len(train.items) + len(test.items) == 40
        assert 0.1 < len(test.items) / 40 < 0.4
    assert splits[0][1].items == splits[1][1].items  # by their ids alone


def test_of_the_hub_as_well(monkeypatch):
    asked = []

    def load_dataset(path, config, split):
        asked.append((path, split))
        return [ROWS["wsc273" if path.endswith("wsc") else "winogrande"]] * 40

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [len(part.items) for part in train_and_test("winogrande", "hub")] == [40, 40]
    assert asked == [("allenai/winogrande", "train"), ("allenai/winogrande", "validation")]
    assert sum(len(part.items) for part in train_and_test("wsc273", "hub")) == 40
