"""Every field of a recipe with values that make no sense: the run works, or ends with one line and exit code 2."""

import dataclasses
import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trials import Trials

from dofla import DoflaError
from dofla.paper.study import Study
from dofla.runs.recipe import Recipe, StudentSpec
from dofla.storage.fields import sections

VALUES = (-1, 0, 0.5, 2**40, 1e300, float("nan"), "x", "", [], {}, None, True)
LASTING = ("windows", "steps", "epochs", "samples", "new_tokens", "prompts")
STUDENT = {"name": "A", "strategy": "hybrid"}


def fields_of(section: str) -> list[str]:
    """The fields of a section of a recipe, or the recipe's own."""
    kind = {"": Recipe, "students": StudentSpec}.get(section) or sections(Recipe)[section]
    names = ["lambda" if field.name == "lam" and not section else field.name for field in dataclasses.fields(kind)]
    return [name for name in names if name not in (*sections(Recipe), "students")]


def changes_to(section: str, name: str, value: object) -> list[str]:
    """What follows ``--set``."""
    if section == "students":
        return [f"students={json.dumps([STUDENT | {name: value}])}"]
    change = f"{section}.{name}={json.dumps(value)}".lstrip(".")
    if section == "end_to_end":
        return [f"students={json.dumps([STUDENT | {'end_to_end': True}])}", "end_to_end.steps=1", change]
    strategy = "measured" if section == "curves" else "hybrid"
    return [f"students={json.dumps([STUDENT | {'strategy': strategy}])}", change]


@pytest.mark.long
@pytest.mark.parametrize("section", ["", *sections(Recipe), "students"])
def test_every_field_of_a_recipe(made, tmp_path, capsys, monkeypatch, section):
    monkeypatch.setattr("dofla.report.write_page_beside", lambda *_: None)  # a second each
    trials = Trials("fields of recipes")
    for name in fields_of(section):
        for value in VALUES:
            if name in LASTING and value == 2**40:  # no fault, but no end either
                continue
            words = [word for change in changes_to(section, name, value) for word in ("--set", change)]
            trials.command(["run", made / "recipe.yaml", "--out", tmp_path / "run", "-q", *words], capsys)
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
    trials.check()


@given(st.one_of(st.text(), st.builds("{}={}".format, st.sampled_from(["budget", "data.length", "data"]), st.text())))
@settings(max_examples=60, derandomize=True)
def test_any_change_of_a_study_is_taken_or_named(change):
    message = "demo.yaml"
    try:
        Study.of("demo", changes=[change])
    except DoflaError as error:
        message = str(error)
    assert "--set" in message or "demo.yaml" in message
