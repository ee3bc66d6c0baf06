"""Bench: what is measured of teacher and students, each figure once, kept in the folder of the run."""

import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from dofla.distillation import DIRECT
from dofla.evaluation import evaluate
from dofla.paper.items import tasks_of
from dofla.paper.methods import LEVERAGE, LOSSES
from dofla.paper.sampled import sample_features
from dofla.paper.study import Study
from dofla.paper.table import Figure
from dofla.profiles.profile import Profile
from dofla.runs.distillation import Students
from dofla.runs.folder import claim
from dofla.runs.recipe import StudentSpec
from dofla.runs.view import View
from dofla.storage.files import read_json, write_json
from dofla.tasks import Task

STUDY = "study.yaml"


class _Students(Students):
    """Students, of which some have features that are drawn by leverage (:data:`LEVERAGE`)."""

    def train(self, spec: StudentSpec, seed: int, home: Path) -> None:
        if spec.start != LEVERAGE:
            return super().train(spec, seed, home)
        windows = self.opened.training.take(self.recipe.profile.windows)
        with self.view.progress(f"draw features of {spec.name}, seed {seed}") as bar:
            sample_features(self.opened.model, windows, lam=self.recipe.lam, seed=seed, progress=bar.stage)


class Bench:
    """The students of a study, and the measures taken of them.

    Every measure is a JSON file in the folder, which holds the seconds it took as well. ``spent`` collects those of
    all files that were looked at since :meth:`begin`, so that a table can say what it cost.
    """

    def __init__(self, study: Study, folder: str | Path, view: View | None = None) -> None:
        # More seeds may be added to a folder later; everything else must stay.
        claim(folder, STUDY, study.to_dict() | {"seeds": "any"})
        self.study, self.folder, self.view = study, Path(folder), view or View(quiet=True)
        self.students = _Students(study, folder, self.view)
        self.spent: dict[str, float] = {}

    @cached_property
    def tasks(self) -> list[Task]:
        """The study's tasks, with the same items for all models."""
        return tasks_of(self.study.tasks)

    def begin(self) -> None:
        """Count seconds anew."""
        self.spent = {}

    @property
    def seconds(self) -> float:
        """The seconds that all measures looked at since :meth:`begin` took."""
        return sum(self.spent.values())

    @property
    def is_language_model(self) -> bool:
        """True if the model predicts next tokens; an encoder is judged by its embeddings."""
        return self.students.opened.model.can_generate()

    @property
    def quality(self) -> tuple[str, str]:
        """The figure that says how good a student is: section and key of :func:`dofla.evaluate`."""
        return ("language", "loss_increase") if self.is_language_model else ("embeddings", "cosine")

    @property
    def quality_title(self) -> str:
        """Name of this figure in tables."""
        return self.quality[1].replace("_", " ")

    @property
    def losses(self) -> list[str]:
        """Losses of the paper that this model can be trained by."""
        return [loss for loss in LOSSES if self._has(loss)]

    def lineup(self, students: Sequence[StudentSpec]) -> list[StudentSpec]:
        """Students, among these, that can be made of this model."""
        return [s for s in students if self._has(s.loss)]

    def _has(self, loss: str | None) -> bool:
        """An encoder has no next-token loss to train on."""
        return self.is_language_model or loss != DIRECT

    def measured(self, path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The contents of the file ``path``, which ``make`` makes first if it is missing."""
        if not path.exists():
            started = time.perf_counter()
            data = make()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"seconds": round(time.perf_counter() - started, 2), **data})
        record = read_json(path, "a measurement")
        self.spent[str(path)] = record["seconds"]
        return record

    def of(
        self, spec: StudentSpec | None, seed: int, what: str, measure: Callable[[PreTrainedModel], dict[str, Any]]
    ) -> dict[str, Any]:
        """A measure of a student, which is made first if need be; without one, of the model as it came."""
        if spec is None:
            return self.measured(self.folder / "teacher" / f"{what}.json", lambda: measure(self.students.opened.model))
        path = self.students.home(spec, seed) / f"{what}.json"
        if not path.exists():
            with self.students.made(spec, seed) as model, self.view.progress(f"{what} {spec.name}, seed {seed}"):
                self.measured(path, lambda: measure(model))
        self.spent[f"{path.parent}/training"] = self.students.seconds(spec, seed)
        return self.measured(path, dict)

    def evaluations(self, spec: StudentSpec) -> list[dict[str, Any]]:
        """The figures of :func:`dofla.evaluate`, per seed."""
        windows, options = self.students.opened.validation, self.study.evaluate.sizes

        def measure(model: PreTrainedModel, seed: int) -> dict[str, Any]:
            return evaluate(model, windows, **options, seed=seed, progress=True).to_dict()

        return [self.of(spec, seed, "evaluation", partial(measure, seed=seed)) for seed in self.study.seeds]

    def profiled(self) -> Profile:
        """The original's profile, whose seconds count."""
        profile = self.students.profile()
        self.spent["profile"] = self.students.profile_seconds()
        return profile


def per_seed(runs: Sequence[Any], *keys: str) -> Figure:
    """The figure at ``keys`` of every run."""
    return Figure.of([float(reduce(getitem, keys, run)) for run in runs])
