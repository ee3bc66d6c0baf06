"""Recipe: everything a run needs, as a YAML file."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml

from dofla.compression.plan import STRATEGY as COMPRESSED
from dofla.errors import DoflaError
from dofla.profiles.tolerance import DEFAULT_LAMBDA
from dofla.storage.fields import build


@dataclass
class DataSpec:
    """Text and how it is cut; see :func:`dofla.token_windows`."""

    source: str | list[str] = "self"
    length: int = 512
    windows: int | None = None
    split: str = "train"
    holdout: float = 0.05
    padded: bool = False
    text_field: str = "text"


@dataclass
class ProfileSpec:
    """Settings of the teacher's profile; ``windows`` is the number of training windows that are read."""

    samples: int | None = None
    windows: int = 64
    batch_size: int = 4
    estimator: str = "attention"
    normalization: str | None = None


@dataclass
class CurvesSpec:
    """Settings of the error curves, for students of strategy ``measured``; ``windows`` of the training windows are
    read. See :func:`dofla.measure_curves`."""

    windows: int = 64
    steps: int = 25
    batch_size: int = 2
    rows: int = 64
    held_out: int = 4


@dataclass
class StudentSpec:
    """One row of the comparison.

    ``budget``, ``lam``, ``normalization`` and ``loss`` are the recipe's where they are not given; ``start`` is how
    features begin: ``data`` (maps that look at data first do so) or ``random``. One that is ``end_to_end`` goes on
    so after its layerwise training, as the recipe's section of that name says. The rest is as for
    :func:`dofla.allocate`. One more strategy is ``compressed``, the compressed cache of :func:`dofla.compress`: it
    has no features and is not ``trained``. Its options are ``size`` or ``ratio``, by default the recipe's,
    ``context``, ``head_budgets`` (``measured`` or ``even``) and ``retrieval_heads``. With a ``budget`` instead, or
    where the recipe has neither size nor ratio, it takes the bytes of so many features per KV head, as other rows
    do.
    """

    name: str = "Measured"
    strategy: str = "measured"
    feature_map: str | None = None
    over_heads: str = "max"
    per_head: bool | None = None
    budget: int | None = None
    lam: float | None = None
    normalization: str | None = None
    loss: str | None = None
    start: str = "data"
    window: int | None = None
    sinks: int | None = None
    token_dtype: str | None = None
    context: int | None = None
    keep_softmax: list[str] = field(default_factory=list)
    head_budgets: str = "measured"
    size: int | str | None = None
    ratio: float | None = None
    retrieval_heads: int | None = None
    trained: bool = True
    end_to_end: bool = False

    def check(self, where: str) -> None:
        """DoflaError if it asks for what its strategy does not have."""
        others = _FOR_FEATURES if self.strategy == COMPRESSED else _FOR_COMPRESSED
        given = next((what for what in others if getattr(self, what) is not None), None)
        if given:
            raise DoflaError(
                f"{where}: student {self.name}: strategy {self.strategy} has no option {given}: leave it out"
            )
        if self.strategy != COMPRESSED:
            return
        if sum(x is not None for x in (self.size, self.ratio, self.budget)) > 1:
            raise DoflaError(f"{where}: student {self.name}: give one of size, ratio and budget")
        if self.trained:
            raise DoflaError(f"{where}: student {self.name} has no features to train: give trained: false")
        if self.head_budgets not in ("measured", "even"):
            raise DoflaError(
                f"{where}: student {self.name}: head_budgets is {self.head_budgets!r}: give measured or even"
            )
        if self.retrieval_heads and self.head_budgets != "measured":
            raise DoflaError(
                f"{where}: student {self.name}: retrieval_heads is {self.retrieval_heads}: they are found when head "
                "budgets are measured, so leave head_budgets out"
            )


_FOR_FEATURES = ("feature_map", "per_head", "loss", "window", "sinks", "token_dtype")
_FOR_COMPRESSED = ("size", "ratio", "retrieval_heads")
"""Options of a student that strategy ``compressed`` does not have, and that it alone has."""


@dataclass
class DistillSpec:
    """Options of :func:`dofla.distill`."""

    loss: str = "output"
    epochs: int = 1
    steps: int | None = None
    batch_size: int = 4
    accumulate: int = 1
    rows: int | None = 64
    learning_rates: dict[str, float] = field(default_factory=dict)
    schedule: str = "cosine"
    own_inputs: float = 0.0
    context: int | None = None
    checkpoint_every: int = 50


@dataclass
class EndToEndSpec:
    """Options of :func:`dofla.distill_end_to_end`, on the windows of ``distill``; no student may ask for it while
    ``steps`` is 0."""

    steps: int = 0
    batch_size: int = 2
    accumulate: int = 1
    weights: str = "lora"
    lora_rank: int = 16
    learning_rates: dict[str, float] = field(default_factory=dict)
    precision: str | None = None
    gradient_checkpointing: bool = False
    context: int | None = None
    checkpoint_every: int = 25


@dataclass
class EvaluateSpec:
    """Windows per forward pass; how many of them the layers are compared on; how many continuations to look at."""

    batch_size: int = 1
    fidelity_windows: int = 16
    prompts: int = 0
    prompt_tokens: int = 32
    new_tokens: int = 48

    @property
    def sizes(self) -> dict[str, int]:
        """Options of :func:`dofla.evaluate`."""
        return {"batch_size": self.batch_size, "fidelity_windows": self.fidelity_windows}

    @property
    def samples(self) -> dict[str, int]:
        """Options of :func:`dofla.evaluation.samples.continuations`."""
        return {"prompts": self.prompts, "prompt_tokens": self.prompt_tokens, "new_tokens": self.new_tokens}


@dataclass
class Recipe:
    """Model, data, budget, the students to compare, and how to train and evaluate them."""

    model: str = ""
    dtype: str | None = None
    device: str | None = None  # cpu, cuda, cuda:1, mps or auto; default cpu
    budget: int = 64
    size: int | str | None = None  # of compressed caches
    ratio: float | None = None
    lam: float = DEFAULT_LAMBDA  # written `lambda` in YAML
    seeds: list[int] = field(default_factory=lambda: [0])
    data: DataSpec = field(default_factory=DataSpec)
    validation: DataSpec = field(default_factory=lambda: DataSpec(split="validation"))
    profile: ProfileSpec = field(default_factory=ProfileSpec)
    curves: CurvesSpec = field(default_factory=CurvesSpec)
    students: list[StudentSpec] = field(default_factory=lambda: [StudentSpec()])
    distill: DistillSpec = field(default_factory=DistillSpec)
    end_to_end: EndToEndSpec = field(default_factory=EndToEndSpec)
    evaluate: EvaluateSpec = field(default_factory=EvaluateSpec)
    track: list[str] = field(default_factory=list)  # where losses go as well: tensorboard, wandb, ...

    sections: ClassVar[dict[str, type]] = {
        "data": DataSpec,
        "validation": DataSpec,
        "profile": ProfileSpec,
        "curves": CurvesSpec,
        "distill": DistillSpec,
        "end_to_end": EndToEndSpec,
        "evaluate": EvaluateSpec,
    }

    @classmethod
    def load(cls, path: str | Path, changes: list[str] | None = None) -> Self:
        """Read a YAML file and apply changes written ``field=value`` or ``section.field=value``.

        Raises:
            DoflaError: naming the file and the field: missing, unknown, or of the wrong kind.
        """
        data = read_yaml(path)
        for change in changes or []:
            apply_change(data, change)
        return cls.from_dict(data, str(path))

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str = "the recipe") -> Self:
        """A recipe from plain data; what is not given keeps its default."""
        data = dict(data)
        if "lambda" in data:
            data["lam"] = data.pop("lambda")
        if not data.get("model"):
            raise DoflaError(f"{where}: 'model' is missing: give a folder, a hub name, or demo")
        students = data.pop("students", None)
        if students is not None:
            if not isinstance(students, list) or not students:
                raise DoflaError(f"{where}: 'students' must be a list of at least one student")
            data["students"] = [build(StudentSpec, x, f"{where}: students[{n}]") for n, x in enumerate(students)]
        if "validation" not in data and isinstance(data.get("data"), dict):
            data["validation"] = data["data"] | {"split": "validation"}
        recipe = build(cls, data, where)
        names = [student.name for student in recipe.students]
        if len(set(names)) < len(names):
            raise DoflaError(f"{where}: two students are called {max(names, key=names.count)!r}: names must differ")
        for student in recipe.students:
            student.check(where)
        unfit = next((student.name for student in recipe.students if student.end_to_end), None)
        if unfit is not None and not recipe.end_to_end.steps:
            raise DoflaError(f"{where}: student {unfit} is end_to_end, and end_to_end.steps is 0: give 1 or more")
        if recipe.size is not None and recipe.ratio is not None:
            raise DoflaError(f"{where}: 'size' and 'ratio' are both given: give one of them")
        if not recipe.seeds:
            raise DoflaError(f"{where}: 'seeds' is empty: give at least one")
        if min(recipe.seeds) < 0:
            raise DoflaError(f"{where}: 'seeds' has {min(recipe.seeds)}: give 0 or more")
        return recipe

    def kept_by_all(self) -> set[str]:
        """Layers that every student keeps softmax, which need not be profiled."""
        return set.intersection(*(set(student.keep_softmax) for student in self.students))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` reads back."""
        data = dataclasses.asdict(self)
        data["lambda"] = data.pop("lam")
        return data


def slug(name: str) -> str:
    """A name as a folder has it."""
    return "-".join(re.findall("[a-z0-9]+", name.lower()))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The fields of a recipe's file; DoflaError naming the file if it is missing, no YAML, or something else."""
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DoflaError(f"recipe {path} does not exist") from None
    except Exception as error:  # the parser lets errors of all kinds through
        raise DoflaError(f"recipe {path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise DoflaError(f"recipe {path}: expected fields like 'model: ...', got {type(data).__name__}")
    return data


def apply_change(data: dict[str, Any], change: str) -> None:
    """Set ``section.field=value`` in a recipe's plain data; DoflaError if it is not of that form."""
    key, equals, text = change.partition("=")
    if not equals or not key:
        raise DoflaError(f"--set {change!r}: write field=value, for instance data.windows=100")
    *sections, name = key.split(".")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise DoflaError(f"--set {change!r}: {section} has no fields")
    try:
        data[name] = yaml.safe_load(text)
    except Exception as error:  # the parser lets errors of all kinds through
        raise DoflaError(f"--set {change!r}: {' '.join(str(error).split())}") from error
