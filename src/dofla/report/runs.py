"""Contents of a run folder, read for the report."""

import dataclasses
import math
import re
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from dofla.errors import DoflaError
from dofla.plans.plan import Plan
from dofla.profiles.profile import Profile
from dofla.runs.models import MODELS
from dofla.runs.recipe import Compression, Distillation, Recipe, read_yaml, slug
from dofla.runs.run import over_seeds
from dofla.storage.files import read_json

RECIPES = ("recipe.yaml", "study.yaml")
SPEED = "speed.json"
"""File in a model's folder: what :func:`dofla.report.speed.timings` measured."""
_BINS = 80  # points of a training curve at most


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


_FAR = 2**20
"""Tokens after which what a cache takes for one more is known."""


@dataclass
class ModelRecord:
    """A model of a run: the evaluations of all its seeds (:func:`dofla.evaluate`); its folder, its plan and what else
    only one seed can give are those of the first."""

    name: str
    folder: Path
    seed: int
    plan: Plan
    evaluations: list[dict[str, Any]]

    @property
    def section(self) -> str:
        """``language`` if the model predicts next tokens, otherwise ``embeddings``."""
        return "language" if "language" in self.evaluations[0] else "embeddings"

    def figure(self, name: str) -> dict[str, float]:
        """``mean`` over seeds, and ``spread``, half their range."""
        return over_seeds([float(x[self.section][name]) for x in self.evaluations])

    @cached_property
    def lost(self) -> float:
        """The loss increase in nats per token, mean over seeds; for an encoder, 1 - cosine."""
        with naming(self.folder):
            is_language_model = self.section == "language"
            return self.figure("loss_increase")["mean"] if is_language_model else 1 - self.figure("cosine")["mean"]

    @property
    def interval(self) -> list[float] | None:
        """The 95 % interval of the loss increase, mean over seeds; None if too few windows were read for one."""
        intervals = [x["language"]["loss_increase_interval"] for x in self.evaluations]
        return None if None in intervals else [statistics.fmean(ends) for ends in zip(*intervals, strict=True)]

    @property
    def likeness(self) -> float:
        """The smaller of an encoder's cosine and rank correlation."""
        return min(self.figure(name)["mean"] for name in ("cosine", "spearman"))

    @property
    def samples(self) -> list[tuple[str, str, str]]:
        """Prompts, each with the original's continuation and its own."""
        written = self.evaluations[0].get("samples", [])
        return [(str(x["prompt"]), str(x["original"]), str(x["model"])) for x in written]

    @property
    def smaller_from(self) -> int | None:
        """The shortest context, in tokens, at which the original's cache is larger; None if there is none."""
        constant, far = (sum(x.cache_bytes(n, self.itemsize) for x in self.plan.layers) for n in (0, _FAR))
        spared = self.itemsize * self.plan.softmax_bytes(1, torch.int8) - (far - constant) / _FAR
        return math.floor(constant / spared) + 1 if spared > 0 else None

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the original's cache."""
        first = self.evaluations[0]
        if "length" not in first:
            return 4
        return first["softmax_bytes"] // self.plan.softmax_bytes(first["length"], torch.int8)

    @property
    def adapter(self) -> Path:
        """The folder of its adapter; it may be missing."""
        last = self.folder / "end_to_end"
        return (last if last.exists() else self.folder) / "adapter"

    @property
    def speed(self) -> dict[str, Any] | None:
        """The record of its speed, if that was measured."""
        path = self.folder / SPEED
        return read_json(path, "a record of speed") if path.exists() else None

    def training_curves(self) -> Iterator[tuple[str, list[tuple[float, float]]]]:
        """For each training its name, and pairs of step and loss: means over layers and over bins of steps."""
        for training, name in (("distill", "layerwise"), ("end_to_end", "end to end")):
            path = self.folder / training / "losses.json"
            if not path.exists():
                continue
            record = read_json(path, "losses")
            losses = [statistics.fmean(step) for step in zip(*record["layers"].values(), strict=False)]
            edges = sorted({round(n * len(losses) / _BINS) for n in range(_BINS + 1)})
            bins = [((a + b + 1) / 2, statistics.fmean(losses[a:b])) for a, b in pairwise(edges)]
            yield f"{name}, {record['loss']}", bins


@dataclass
class RunRecord:
    """A folder written by ``dofla run``, or by ``dofla reproduce``, whose folders are made alike.

    Attributes:
        text: the recipe as it stands in the folder.
        machine: versions and hardware.
        models: those that are finished, the one that lost least first.
        profile: of the original, if there is one.
    """

    folder: Path
    recipe: Recipe
    text: str
    machine: dict[str, Any]
    models: list[ModelRecord]
    profile: Profile | None

    @property
    def section(self) -> str:
        """The section of its models' evaluations, ``language`` or ``embeddings``."""
        return self.models[0].section


def read_run(folder: str | Path) -> RunRecord:
    """Read a run's folder; DoflaError if it is none, no model in it is finished, or a record of one is damaged."""
    folder = Path(folder)
    path = next((folder / name for name in RECIPES if (folder / name).exists()), None)
    if path is None:
        raise DoflaError(f"{folder} is no run folder: it has no {RECIPES[0]}; give one that dofla run has written")
    recipe = _recipe(path)
    models = _models(folder, recipe)
    if not models:
        raise DoflaError(f"{folder} has no finished model yet: let dofla run go on until one is evaluated")
    machine = read_json(folder / "run.json", "a machine") if (folder / "run.json").exists() else {}
    profile = Profile.load(folder / "profile") if (folder / "profile").exists() else None
    return RunRecord(folder, recipe, path.read_text(encoding="utf-8"), machine, models, profile)


def _recipe(path: Path) -> Recipe:
    """The recipe in a file; for a study, which has sections and seeds of its own, the part that is a recipe's."""
    known = {field.name for kind in (Compression, Distillation) for field in dataclasses.fields(kind)} | {"lambda"}
    data = {key: value for key, value in read_yaml(path).items() if key in known}
    if data.get("seeds") == "any":
        del data["seeds"]
    return Recipe.from_dict(data, str(path))


def _models(folder: Path, recipe: Recipe) -> list[ModelRecord]:
    names = {slug(spec.name): spec.name for spec in recipe.models}
    seeds: dict[str, list[int]] = {}
    for path in folder.glob(f"{MODELS}/*-seed*/evaluation.json"):
        if found := re.fullmatch(r"(.+)-seed(\d+)", path.parent.name):
            seeds.setdefault(found[1], []).append(int(found[2]))
    models = []
    for name in sorted(seeds):
        homes = [folder / MODELS / f"{name}-seed{seed}" for seed in sorted(seeds[name])]
        evaluations = [read_json(home / "evaluation.json", "an evaluation") for home in homes]
        with naming(homes[0]):
            title = names.get(name) or evaluations[0].get("name", name)
            models.append(ModelRecord(title, homes[0], min(seeds[name]), Plan.load(homes[0]), evaluations))
    return sorted(models, key=lambda model: model.lost)
