"""Contents of a run folder, read for the report. Older runs lack some of them."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dofla.errors import DoflaError
from dofla.plans.plan import Plan
from dofla.profiles.profile import Profile
from dofla.runs.recipe import Recipe, read_yaml, slug
from dofla.storage.files import read_json

RECIPES = ("recipe.yaml", "study.yaml")
LOOK = "report.json"
"""File of what is measured for the report alone: for the teacher in the run's folder, for a student in its own."""


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Within the block a record that lacks something, or holds something else, is a DoflaError naming the folder."""
    try:
        yield
    except DoflaError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        what = f"{type(error).__name__}: {error}"
        raise DoflaError(f"{folder} holds a record that is not as dofla writes it ({what}): make it again") from error


class _Folder:
    folder: Path

    def record(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder; empty if there is none."""
        path = self.folder / name
        return read_json(path, "a record") if path.exists() else {}


@dataclass
class StudentRecord(_Folder):
    """A student that is finished, with all its seeds; files that only one seed can give are the first one's.

    Attributes:
        name: as in the recipe.
        folder: of the first seed.
        seed: the first.
        plan: what its layers are.
        evaluations: of each seed, see :func:`dofla.evaluate`.
    """

    name: str
    folder: Path
    seed: int
    plan: Plan
    evaluations: list[dict[str, Any]]

    @property
    def is_language_model(self) -> bool:
        """True if it predicts next tokens; an encoder is judged by its embeddings."""
        return "language" in self.evaluations[0]

    @property
    def lost(self) -> float:
        """The cost of linearizing, mean over seeds: the loss increase in nats per token; for an encoder, 1 − cosine."""
        with naming(self.folder):
            if self.is_language_model:
                return statistics.fmean(x["language"]["loss_increase"] for x in self.evaluations)
            return 1 - statistics.fmean(x["embeddings"]["cosine"] for x in self.evaluations)

    @property
    def adapter(self) -> Path:
        """The folder with what it has learned; it may be missing."""
        last = self.folder / "end_to_end" / "adapter"
        return last if last.exists() else self.folder / "adapter"

    @property
    def trained(self) -> bool:
        """True if it was trained, or is as it started."""
        return any((self.folder / name).exists() for name in ("distill", "end_to_end"))

    def lacks(self, part: str) -> bool:
        """True if nobody has tried yet to measure this part of :data:`LOOK`."""
        own = self.record(LOOK)
        return part not in own and part not in own.get("left_out", {})


@dataclass
class RunRecord(_Folder):
    """A folder written by ``dofla run``, or by ``dofla reproduce`` and the benchmarks, which are made alike.

    Attributes:
        folder: it.
        recipe: what was asked for.
        text: the recipe as it stands in the folder.
        machine: versions and hardware.
        students: those that are finished, in the recipe's order.
        profile: of the teacher, if there is one.
        unread: why a profile that is there cannot be read; older versions wrote other ones.
    """

    folder: Path
    recipe: Recipe
    text: str
    machine: dict[str, Any]
    students: list[StudentRecord]
    profile: Profile | None
    unread: list[str]

    @property
    def best(self) -> list[StudentRecord]:
        """The students, the one that lost least first."""
        return sorted(self.students, key=lambda student: student.lost)


def read_run(folder: str | Path) -> RunRecord:
    """Read a run's folder.

    Raises:
        DoflaError: it is no run's folder, no student in it is finished, or a record of one is damaged.
    """
    folder = Path(folder)
    path = next((folder / name for name in RECIPES if (folder / name).exists()), None)
    if path is None:
        raise DoflaError(f"{folder} is no run folder: it has no {RECIPES[0]}; give one that dofla run has written")
    recipe = _recipe(path)
    students = _students(folder, recipe)
    if not students:
        raise DoflaError(f"{folder} has no finished student yet: let dofla run go on until one is evaluated")
    machine = read_json(folder / "run.json", "a machine") if (folder / "run.json").exists() else {}
    profile, unread = None, []
    if (folder / "profile").exists():
        try:
            profile = Profile.load(folder / "profile")
        except DoflaError as error:
            unread.append(str(error))
    return RunRecord(folder, recipe, path.read_text(encoding="utf-8"), machine, students, profile, unread)


def _recipe(path: Path) -> Recipe:
    """The recipe in a file; for a study, which has sections and seeds of its own, the part that is a recipe's."""
    known = {field.name for field in dataclasses.fields(Recipe)} | {"lambda"}
    data = {key: value for key, value in read_yaml(path).items() if key in known}
    if data.get("seeds") == "any":
        del data["seeds"]
    return Recipe.from_dict(data, str(path))


def _students(folder: Path, recipe: Recipe) -> list[StudentRecord]:
    names = {slug(spec.name): spec.name for spec in recipe.students}
    seeds: dict[str, list[int]] = {}
    for path in folder.glob("students/*-seed*/evaluation.json"):
        found = re.fullmatch(r"(.+)-seed(\d+)", path.parent.name)
        if found:
            seeds.setdefault(found[1], []).append(int(found[2]))
    order = [name for name in names if name in seeds] + sorted(seeds.keys() - names.keys())
    students = []
    for name in order:
        homes = [folder / "students" / f"{name}-seed{seed}" for seed in sorted(seeds[name])]
        evaluations = [read_json(home / "evaluation.json", "an evaluation") for home in homes]
        title = names.get(name) or evaluations[0].get("name", name)
        students.append(StudentRecord(title, homes[0], min(seeds[name]), Plan.load(homes[0]), evaluations))
    return students
