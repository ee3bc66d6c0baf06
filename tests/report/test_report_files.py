"""What the report keeps in a run's folder, and what it does with folders that lack something."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict

import pytest
import yaml
from by_budget import compress
from command_line import call
from transformers import AutoModelForCausalLM

import dofla.report
from dofla.distillation.fidelity import attention_fidelity
from dofla.errors import DoflaError
from dofla.integration.student import Student
from dofla.report import html, look, look_closer, read_run, report_on, write_report
from dofla.report.page import run_data
from dofla.report.runs import LOOK
from dofla.runs.recipe import Recipe
from dofla.runs.run import run as run_recipe
from dofla.runs.workshop import Workshop
from dofla.storage.lock import locked

FIRST = "model.layers.0.self_attn"


@pytest.fixture
def copied(llama_run, tmp_path):
    """A run that a test may damage, as if it had been moved."""
    return shutil.copytree(llama_run, tmp_path / "run")


def data_of(path):
    """The data that a page holds."""
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)[1]
    return json.loads(text)


def forget(folder):
    for path in folder.rglob(LOOK):
        path.unlink()


@pytest.mark.slow
def test_a_run_measures_what_its_page_needs(llama_run):
    run = read_run(llama_run)
    assert [student.name for student in run.students] == ["Performer", "DoF", "Measured", "Compressed", "One softmax"]
    data = run_data(run)
    assert data["students"][data["best"]]["lost"] == min(student["lost"] for student in data["students"])
    kept = run.record(LOOK)
    assert len(kept["pieces"]) == len(kept["ids"]) == 64
    assert kept["longest"] == 256
    by_name = {student["name"]: student for student in data["students"]}
    assert all(layer["before"] is None for layer in by_name["Performer"]["layers"])
    for layer in by_name["Measured"]["layers"]:
        assert layer["before"]["kl"] > 0
        assert layer["before"] != layer["after"]
    kept, linear = by_name["One softmax"]["layers"]
    assert (kept["name"], kept["sizes"], kept["bytes"]) == (FIRST, None, 0)
    assert linear["sizes"]
    assert by_name["One softmax"]["kept_bytes"] * 2 == by_name["One softmax"]["cache_bytes"]
    for student in run.students:
        record = student.record(LOOK)
        assert list(record["maps"]["layers"]) == [x.name for x in student.plan.layers if not x.keep_softmax]
        assert len(record["texts"]) == 3
        assert data["students"][0]["seeds"] == [0, 1]


def test_state_bytes_are_those_of_the_evaluation(llama_run):
    run = read_run(llama_run)
    for student, shown in zip(run.students, run_data(run)["students"], strict=True):
        first = student.evaluations[0]
        assert shown["state_bytes"] + shown["kept_bytes"] * first["length"] == first["state_bytes"]
        assert shown["cache_bytes"] * first["length"] == first["softmax_bytes"]
        assert sum(layer["bytes"] for layer in shown["layers"]) == shown["state_bytes"]


def test_what_was_measured_is_not_measured_again(copied, tmp_path, monkeypatch):
    monkeypatch.setattr(dofla.report, "look_closer", lambda *_, **__: pytest.fail("measured again"))
    path = write_report([copied], tmp_path / "again.html", speed=True)
    assert data_of(path)["runs"][0]["students"][0]["texts"]


def test_what_is_missing_is_measured_once_more(copied, tmp_path):
    before = {path: path.read_text() for path in copied.rglob(LOOK)}
    forget(copied)
    run = read_run(copied)
    look_closer(run, Workshop(run.recipe, copied), lambda *_: None, speed=True)
    for path, text in before.items():
        old, new = json.loads(text), json.loads(path.read_text())
        for record in (old, new):  # times differ, the machine may
            for name in ("speed", "machine", "sha256"):
                record.pop(name, None)
        assert old == new


def test_students_are_timed_when_that_is_asked_for(copied, tmp_path, monkeypatch):
    forget(copied)
    monkeypatch.setattr(look, "MOST", 1)
    out = tmp_path / "page.html"
    assert call("report", copied, "--out", out) == 0
    (run,) = data_of(out)["runs"]
    best = run["students"][run["best"]]
    assert best["speed"] is None
    assert run["commands"]["speed"] == f"dofla report {copied} --speed"
    monkeypatch.setattr(look, "_of_student", lambda *_: pytest.fail("measured again"))
    assert call(*run["commands"]["speed"].split()[1:], "--out", out) == 0
    (run,) = data_of(out)["runs"]
    timed = run["students"][run["best"]]
    assert timed["speed"]["student"]["read"]
    assert timed["texts"] == best["texts"]


def test_without_the_model_the_page_says_what_is_missing(copied, tmp_path, capsys):
    forget(copied)
    recipe = yaml.safe_load((copied / "recipe.yaml").read_text())
    (copied / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"model": "gone/model"}))
    out = tmp_path / "page.html"
    assert call("report", copied, "--out", out) == 0
    assert "gone/model" in capsys.readouterr().out
    (run,) = data_of(out)["runs"]
    assert run["text"] is None
    assert "gone/model" in run["notes"][0]
    assert all(student[part] is None for student in run["students"] for part in ("maps", "texts", "speed"))
    assert not list(copied.rglob(LOOK))


def test_a_folder_at_work_is_left_alone(copied, tmp_path):
    forget(copied)
    with locked(copied):
        (run,) = data_of(write_report([copied], tmp_path / "page.html"))["runs"]
    assert "in use" in run["notes"][0]
    assert not list(copied.rglob(LOOK))


def test_students_that_are_not_looked_at_say_why(copied, tmp_path, monkeypatch):
    monkeypatch.setattr(look, "MOST", 2)
    forget(copied)
    best, gone, *others = read_run(copied).best
    shutil.rmtree(gone.adapter)
    (run,) = data_of(write_report([copied], tmp_path / "page.html"))["runs"]
    students = {student["name"]: student for student in run["students"]}
    assert [path.parent.name for path in copied.rglob(f"students/*/{LOOK}")] == [best.folder.name]
    assert students[best.name]["maps"]
    assert students[gone.name]["left_out"]["maps"] == f"{gone.adapter} is gone"
    assert all("only the 2 students" in students[other.name]["left_out"]["speed"] for other in others)


def test_maps_of_another_text_are_not_shown(copied):
    record = json.loads((copied / LOOK).read_text())
    del record["sha256"]
    record["ids"] = record["ids"][:-8]
    (copied / LOOK).write_text(json.dumps(record))
    assert all(student["maps"] is None for student in run_data(read_run(copied))["students"])


def test_larger_samples_take_the_place_of_the_small_ones(copied):
    home = copied / "students" / "measured-seed0"
    figures = {"accuracy": 0.5, "greedy": 0.25, "loss": 1.0}
    recall = {"length": 128, "depth": 0.0, "n": 9, "chance": 0.1, "teacher": figures, "student": figures}
    generation = {"agreed_tokens": 7.5, "new_tokens": 64, "prompts": 32}
    record = {"recall": {"text": "word pairs", "records": [recall]}, "generation": generation}
    (home / "probe.json").write_text(json.dumps(record))
    acc = {"teacher": 0.4, "student": 0.45, "difference": 0.05, "difference_stderr": 0.05}
    (home / "tasks.json").write_text(
        json.dumps({"tasks": {"tasks": [{"task": "quiz", "items": 20, "metrics": {"acc": acc}, "agreement": 0.9}]}})
    )
    students = {student["name"]: student for student in run_data(read_run(copied))["students"]}
    measured = students["Measured"]
    assert measured["recall"]["points"][0] | {"distance": 128, "student": 0.5} == measured["recall"]["points"][0]
    assert measured["agreed"] == {"share": 7.5 / 64, "prompts": 32}
    assert (measured["tasks"]["teacher"], measured["tasks"]["student"]) == (0.4, 0.45)
    assert students["DoF"]["tasks"] is None


def test_too_many_maps_for_one_page(llama_run, tmp_path, monkeypatch):
    whole = write_report([llama_run], tmp_path / "whole.html").stat().st_size
    monkeypatch.setattr(html, "LIMIT", whole - 1)
    path = write_report([llama_run], tmp_path / "smaller.html")
    assert path.stat().st_size < whole
    students = data_of(path)["runs"][0]["students"]
    gone = [student["name"] for student in students if student["maps"] is None]
    assert gone == [max(students, key=lambda student: student["lost"])["name"]]
    monkeypatch.setattr(html, "LIMIT", 1000)
    with pytest.raises(DoflaError, match="report fewer runs"):
        write_report([llama_run], tmp_path / "none.html")
    assert not (tmp_path / "none.html").exists()


def test_the_verbs_write_their_part(copied, tmp_path, capsys):
    assert call("report", copied, "--json", "--out", tmp_path / "page.html") == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == (tmp_path / "page.html").stat().st_size
    measured = ["--strategy", "measured", "--curves", copied / "curves-mlp.json", "--budget", 14]
    options = ["--out", tmp_path / "plan.json", "--html", tmp_path / "plan.html"]
    assert call("allocate", copied / "profile", *measured, *options) == 0
    (run,) = data_of(tmp_path / "plan.html")["runs"]
    assert [layer["name"] for layer in run["plan"]] == [FIRST, "model.layers.1.self_attn"]
    assert run["profile"]["names"] == [layer["name"] for layer in run["plan"]]
    recipe = yaml.safe_load((copied / "recipe.yaml").read_text())
    text = ["--data", recipe["data"]["source"], "--length", 32, "--windows", 4, "--samples", 32]
    pages = ["--out", tmp_path / "profile", "--html", tmp_path / "profile.html"]
    assert call("profile", recipe["model"], *text, *pages) == 0
    (run,) = data_of(tmp_path / "profile.html")["runs"]
    assert run["name"] == str(tmp_path / "profile")
    assert call("profile", recipe["model"], *text, "--out", tmp_path / "other", "--html", tmp_path / "plan.html") == 2
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: (run / "recipe.yaml").unlink(), ["no run folder", "recipe.yaml"]),
        (lambda run: shutil.rmtree(run / "students"), ["no finished student"]),
        (lambda run: (run / "recipe.yaml").write_text("model: [x"), ["recipe.yaml", "cannot be read"]),
        (lambda run: (run / LOOK).write_text((run / LOOK).read_text().replace("256", "257", 1)), [LOOK, "damaged"]),
        (lambda run: (run / "students/dof-seed0/evaluation.json").write_text("{"), ["evaluation.json"]),
        (lambda run: (run / "students/dof-seed0/plan.json").unlink(), ["plan.json"]),
        (lambda run: (run / "students/dof-seed0/distill/losses.json").write_text("[]"), ["losses.json"]),
        (lambda run: (run / "students/dof-seed0/distill/losses.json").write_text("{}"), ["dof-seed0", "'layers'"]),
        (
            lambda run: (run / "students/dof-seed0/probe.json").write_text('{"recall": 3}'),
            ["dof-seed0", "make it again"],
        ),
        (lambda run: (run / "students/dof-seed0/tasks.json").write_text('{"tasks": [1]}'), ["dof-seed0"]),
    ],
)
def test_damage_is_one_line_that_names_the_file(copied, tmp_path, capsys, damage, words):
    damage(copied)
    assert call("report", copied, "--out", tmp_path / "page.html") == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    for word in words:
        assert word in error
    assert not (tmp_path / "page.html").exists()


def test_before_it_is_trained_a_memory_that_fades_is_one_already(home, tmp_path):
    model, text = str(home / "llama"), str(home / "text.txt")
    given = {
        "model": model,
        "budget": 12,
        "data": {"source": text, "length": 64, "windows": 8},
        "validation": {"source": text, "length": 64, "windows": 8, "split": "all"},
        "profile": {"samples": 32, "windows": 4},
        "students": [{"name": "Old", "strategy": "compressed", "trained": False, "end_to_end": True}],
        "end_to_end": {"steps": 1},
        "evaluate": {"batch_size": 2, "fidelity_windows": 2},
    }
    folder = tmp_path / "run"
    run_recipe(Recipe.from_dict(given), folder, finish=report_on)
    (student,) = read_run(folder).students
    windows = Workshop(read_run(folder).recipe, folder).validation().take(2)
    untrained = compress(AutoModelForCausalLM.from_pretrained(model), windows, budget=12, batch_size=2)
    expected = attention_fidelity(Student.of(untrained), windows, batch_size=2, seed=0)
    assert student.record(LOOK)["before"] == {name: asdict(layer) for name, layer in expected.items()}
