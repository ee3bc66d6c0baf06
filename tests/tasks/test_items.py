"""Task files, and how items become text."""

import gzip
import json
from dataclasses import replace

import pytest

from dofla import DoflaError
from dofla.runs.demo import TASKS
from dofla.tasks import KNOWN, STYLES, Item, load_task

GOOD = {"question": "Why?", "choices": ["so", "no"], "answer": 1}


def written(path, *lines):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def test_items_names_and_styles(tmp_path):
    task = load_task(written(tmp_path / "arc_easy-test.jsonl.gz", GOOD, "", GOOD | {"id": "x", "context": "It is."}))
    assert (task.name, task.style, len(task.items)) == ("arc_easy", "question", 2)
    assert task.items[0] == Item("Why?", ("so", "no"), 1)
    assert (task.items[1].id, task.items[1].context) == ("x", "It is.")
    assert load_task(written(tmp_path / "a.jsonl", GOOD | {"question": "It _ so"})).style == "blank"
    assert load_task(tmp_path / "a.jsonl", name="logiqa").style == "passage"
    assert load_task(tmp_path / "a.jsonl", style="plain").style == "plain"
    assert {load_task(path).style for path in TASKS.glob("*.jsonl.gz")} == {"plain"}


def test_a_part_of_a_task(tmp_path):
    task = load_task(written(tmp_path / "a.jsonl", *(GOOD | {"id": n} for n in range(20))))
    ids = [item.id for item in task.take(5).items]
    assert ids == sorted(ids)
    assert len(set(ids)) == 5
    assert task.take(30) is task


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["line 2", "no JSON"]),
        ("[1]", ["line 2", "list"]),
        ({"question": "?", "choices": ["a", "b"]}, ["line 2", "'answer' is missing"]),
        (GOOD | {"choices": ["one"]}, ["line 2", "two texts"]),
        (GOOD | {"choices": ["one", 2]}, ["line 2", "two texts"]),
        (GOOD | {"answer": 2}, ["line 2", "answer is 2", "0 to 1"]),
        (GOOD | {"answer": "b"}, ["line 2", "answer is 'b'"]),
        (GOOD | {"question": None}, ["line 2", "question is None"]),
        (GOOD | {"context": 3}, ["line 2", "context is 3"]),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, words):
    path = written(tmp_path / "bad.jsonl", GOOD, line)
    with pytest.raises(DoflaError, match=".*".join([str(path), *words])):
        load_task(path)


def test_bad_files(tmp_path):
    with pytest.raises(DoflaError, match="does not exist"):
        load_task(tmp_path / "none.jsonl")
    with pytest.raises(DoflaError, match="no items"):
        load_task(written(tmp_path / "empty.jsonl", ""))
    (tmp_path / "raw.jsonl.gz").write_text("{}")
    with pytest.raises(DoflaError, match="cannot be read"):
        load_task(tmp_path / "raw.jsonl.gz")
    with pytest.raises(DoflaError, match=r"'short'.*question"):
        load_task(written(tmp_path / "a.jsonl", GOOD), style="short")


@pytest.mark.parametrize(
    ("style", "context", "second"),
    [
        ("question", "Question: Why?\nAnswer:", " not so"),
        (
            "letters",
            "The following are multiple choice questions (with answers) about high school physics.\n\n"
            "Why?\nA. so\nB. not so\nAnswer:",
            " B",
        ),
        ("passage", "Passage: It is.\nQuestion: Why?\nChoices:\nA. so\nB. not so\nAnswer:", " not so"),
    ],
)
def test_an_item_is_asked_in_the_words_of_its_style(style, context, second):
    item = Item("Why?", ("so", "not so"), 0, context="It is." if style == "passage" else None)
    requests = STYLES[style](replace(item, subject="high_school_physics"))
    assert [tuple(request) for request in requests] == [(context, " A" if second == " B" else " so"), (context, second)]
    assert set(KNOWN.values()) <= set(STYLES)


@pytest.mark.parametrize(
    ("question", "context"),
    [
        ("Ann left. _ was late.", "Ann left. The car"),
        ("Ann left because _ was late.", "Ann left because the car"),
        ("_ was late.", "The car"),
        ("'Go!' _ was late.", "'Go!' the car"),
    ],
)
def test_a_choice_loses_its_capital_amid_a_sentence(question, context):
    first, second = STYLES["blank"](Item(question, ("The car", "Thea"), 0))
    assert first == (context, " was late.")
    assert second.context.endswith("Thea")
    with pytest.raises(DoflaError, match="item 7 has no blank"):
        STYLES["blank"](Item("Why?", ("a", "b"), 0, id=7))
