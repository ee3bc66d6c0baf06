"""The verb: files in, a record and a model out; bad input is one line."""

import json

import datasets
import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from dofla.cli import app
from dofla.errors import DoflaError
from dofla.integration.checkpoint import save_adapter
from dofla.integration.student import is_linearized
from dofla.integration.surgery import linearize
from dofla.tasks import Task
from dofla.tasks.finetune.data import split, train_and_test


@pytest.fixture(scope="module")
def home(toy, tiny, tmp_path_factory):
    """A folder with a teacher, its student's adapter, and the toy task in files."""
    folder = tmp_path_factory.mktemp("finetune")
    teacher = toy.model("llama")
    teacher.save_pretrained(folder / "teacher")
    toy.tokenizer.save_pretrained(folder / "teacher")
    teacher.config._name_or_path = str(folder / "teacher")
    save_adapter(linearize(teacher, tiny.plan(teacher, 8)), folder / "adapter")
    return folder


@pytest.fixture
def tasks(toy, write, tmp_path):
    """A folder with both files of one task, and one file of two others."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name in ("toy-train", "toy-test", "learn-train", "ask-test"):
        write(folder / f"{name}.jsonl", toy.task.items)
    return folder


def call(*arguments):
    return CliRunner().invoke(app, ["finetune", *map(str, arguments)], env={"COLUMNS": "80"})


FAST = ["--learning-rate", "0.01", "--batch-size", "4"]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "options"), [("teacher", []), ("adapter", []), ("adapter", ["--lora-rank", "4"])])
def test_teachers_and_students_by_one_verb(home, tasks, tmp_path, model, options):
    out = tmp_path / "out"
    done = call(home / model, "--task", "toy", "--tasks-folder", tasks, "--out", out, *FAST, "--epochs", 6, *options)
    assert done.exit_code == 0, done.exception
    assert max(map(len, done.stdout.splitlines())) <= 80
    record = json.loads((out / "result.json").read_text())
    assert record["accuracy"] == 1.0 or options
    assert len(record["epochs"]) == 6
    assert record["model"]["attention"] == ("softmax" if model == "teacher" else "linear")
    assert record["settings"]["source"] == "default, but learning_rate, batch_size, epochs"
    assert record["machine"]["accelerate"]
    opened = AutoModelForCausalLM.from_pretrained(out / "model")
    assert is_linearized(opened) == (model == "adapter")
    # What was written is a model as any other.
    again = call(out / "model", "--task", "toy", "--tasks-folder", tasks, "--out", tmp_path / "again", "--epochs", 1)
    assert again.exit_code == 0, again.exception
    assert json.loads((tmp_path / "again" / "result.json").read_text())["accuracy"] >= record["accuracy"]


def test_where_items_come_from(tasks):
    both = train_and_test("toy", folder=tasks)
    assert [len(part.items) for part in both[:2]] == [24, 24]
    for name in ("learn", "ask", str(tasks / "learn-train.jsonl")):
        learned, tested, said = train_and_test(name, folder=tasks)
        assert len(learned.items) + len(tested.items) == 24
        assert not {item.id for item in learned.items} & {item.id for item in tested.items}
        assert "a fifth held out" in said
    learned, tested, _ = train_and_test(str(tasks / "learn-train.jsonl"), tasks / "ask-test.jsonl")
    assert (learned.name, tested.name, len(tested.items)) == ("learn", "learn", 24)


def test_a_split_depends_on_ids_alone(toy):
    first, held = split(toy.task)
    assert split(Task("toy", "question", toy.task.items[::-1]))[1].items == held.items[::-1]
    assert 0.1 < len(held.items) / 24 < 0.4
    assert len(first.items) + len(held.items) == 24


def test_bad_input_is_one_line_and_leaves_nothing(home, tasks, toy, write, tmp_path):
    one = write(tmp_path / "one.jsonl", toy.task.items[:1])
    cases = [
        (["--task", tmp_path / "none.jsonl"], "none.jsonl does not exist"),
        (["--task", "none", "--tasks-folder", tasks], "no none-train.jsonl or none-train.jsonl.gz in"),
        (["--task", "ask", "--tasks-folder", tasks, "--test", one], "no ask-train.jsonl"),
        (["--task", one], "1 items are too few to hold some out"),
        (["--task", "toy", "--tasks-folder", tasks, "--learning-rate", "0"], "learning_rate is 0.0"),
        (["--task", "toy", "--tasks-folder", tasks, "--style", "song"], "unknown style"),
    ]
    for arguments, message in cases:
        done = call(home / "teacher", *arguments, "--out", tmp_path / "out")
        assert isinstance(done.exception, DoflaError), arguments
        assert message in str(done.exception)
        assert "\n" not in str(done.exception)
        assert not (tmp_path / "out").exists()


def test_help_fits_a_terminal():
    done = call("--help")
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_papers_tasks_come_from_the_hub_where_there_is_no_file(monkeypatch, tmp_path):
    rows = [{"sentence": f"a{n} _ b", "option1": "c", "option2": "d", "answer": "1"} for n in range(40)]
    wsc = {"text": "a he b", "pronoun": "he", "pronoun_loc": 2, "options": ["c", "d"], "label": 0}
    asked = []

    def load_dataset(path, config, split):
        asked.append((path, split))
        return [wsc] * 40 if path.endswith("wsc") else rows

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    train, test, source = train_and_test("winogrande")
    assert (len(train.items), len(test.items)) == (40, 40)
    assert asked == [("allenai/winogrande", "train"), ("allenai/winogrande", "validation")]
    assert "hub" in source
    train, test, source = train_and_test("wsc273")
    assert len(train.items) + len(test.items) == 40
    assert "held out" in source
