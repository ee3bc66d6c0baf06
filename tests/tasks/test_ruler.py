"""RULER's tasks, made without a network, and asked of both models."""

import re
import sys

import pytest
from students import student_of

from dofla import DoflaError
from dofla.tasks import evaluate_tasks
from dofla.tasks.ruler import TASKS, ruler_tasks

LENGTH = 2048


@pytest.fixture
def book(tmp_path):
    """A text with a word of its own in each sentence."""
    path = tmp_path / "book.txt"
    path.write_text(" ".join(f"There lived the old cat {n % 10}." for n in range(400)))
    return path


@pytest.fixture
def offline(monkeypatch):
    """Whatever asks for data of nltk, or of the hub, fails."""
    import datasets
    import nltk

    def refused(*_, **__):
        raise AssertionError("a download")

    for module, name in ((nltk, "download"), (datasets, "load_dataset")):
        monkeypatch.setattr(module, name, refused)


@pytest.fixture
def student(tiny):
    return student_of(tiny, tiny.llama(vocab_size=2048, max_position_embeddings=LENGTH), features=8)


def prompts(tokenizer, book, count=1, seed=0, names=TASKS):
    """Task → prompts, as the harness asks them."""
    tasks = ruler_tasks(names, tokenizer, LENGTH, book, count, seed)["tasks"]
    for task in tasks.values():
        task.build_all_requests()
    return {name: [request.args[0] for request in task.instances] for name, task in tasks.items()}


def test_contexts_are_those_of_the_seed_within_the_length_and_of_the_text(tokenizer, book, offline):
    made, more = prompts(tokenizer, book), prompts(tokenizer, book, count=2)
    assert [*made] == TASKS
    for name, (prompt,) in made.items():
        assert LENGTH // 3 < len(tokenizer(prompt).input_ids) <= LENGTH, name
        assert more[name][0] == prompt != more[name][1], name
        essays = name.startswith("niah") and name not in ("niah_single_1", "niah_multikey_2", "niah_multikey_3")
        assert ("There lived the old cat" in prompt) == essays, name
    needle = re.search(r"One of the special magic numbers for (\S+) is: (\d{7})\.", made["niah_single_2"][0])
    assert "mentioned in the provided text is" in made["niah_single_2"][0].partition("What is the special")[2]
    assert needle[1] in made["niah_single_2"][0].partition("What is the special")[2]
    assert prompts(tokenizer, book, seed=1, names=["ruler_cwe"])["ruler_cwe"] != made["ruler_cwe"]


def test_both_models_are_asked_and_the_results_name_length_and_text(student, tokenizer, book, offline):
    options = {"limit": 1, "context_length": LENGTH, "haystack": book}
    results = evaluate_tasks(student, tokenizer, ["ruler"], **options)
    said = f"Contexts of 2,048 tokens, {book} in place of RULER's essays"
    assert "".join(said.split()) in "".join(str(results).split())  # lines are folded anywhere in a long path
    assert results.to_dict()["contexts"] == f"Contexts of 2,048 tokens, {book} in place of RULER's essays"
    found = results.tasks
    assert [(task.task, task.items) for task in found] == [*((name, 1) for name in TASKS), ("ruler", 11)]
    for task in found:
        (row,) = task.metrics.items()
        assert row[0] == "string_match"
        assert 0 <= row[1].model <= 1
    (single,) = evaluate_tasks(student, tokenizer, ["niah_single_2"], **options).tasks
    assert single == found[1]


def test_too_short_and_too_long_contexts_and_short_texts_are_refused(student, tokenizer, tmp_path, monkeypatch):
    for length, match in ((100, "context_length is 100: RULER's contexts need"), (4096, "the model has 2048 pos")):
        with pytest.raises(DoflaError, match=match):
            evaluate_tasks(student, tokenizer, ["ruler"], limit=1, context_length=length)
    (tmp_path / "few.txt").write_text("A few words.")
    with pytest.raises(DoflaError, match=r"niah_single_2 fills \d+ tokens of 2048: give a longer"):
        prompts(tokenizer, tmp_path / "few.txt", names=["niah_single_2"])
    with pytest.raises(DoflaError, match="no such file"):
        prompts(tokenizer, tmp_path / "none.txt")
    monkeypatch.setitem(sys.modules, "lm_eval.tasks.ruler.prepare_niah", None)
    with pytest.raises(DoflaError, match=r"dofla\[ruler\]"):
        prompts(tokenizer, "sample")
