"""Recipe: everything a run needs, as a YAML file. It compresses a model, or distills students if it lists any."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import yaml

from dofla.errors import DoflaError, about, check_numbers
from dofla.profiles.tolerance import DEFAULT_LAMBDA
from dofla.runs import DEMO, RECIPES
from dofla.storage.fields import build, known_prefill


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
    read. See :func:`dofla.linear.measure_curves`."""

    windows: int = 64
    steps: int = 25
    batch_size: int = 2
    rows: int = 64
    held_out: int = 4


@dataclass
class DistillSpec:
    """Options of :func:`dofla.linear.distill`."""

    loss: str = "output"
    epochs: int = 1
    steps: int | None = None
    batch_size: int = 4
    accumulate: int = 1
    rows: int | None = 64
    learning_rates: dict[str, float] = field(default_factory=dict)
    context: int | None = None
    checkpoint_every: int = 50


@dataclass
class EndToEndSpec:
    """Options of :func:`dofla.linear.distill_end_to_end`, on the windows of ``data``. Nothing is trained so while
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
    """Windows per forward pass, how many of them the layers are compared on, and prompts to continue.

    ``prompts`` are texts, or how many beginnings of held-out windows are taken, each of ``prompt_tokens``; they are
    continued by ``new_tokens``.
    """

    batch_size: int = 1
    fidelity_windows: int = 16
    prompts: int | list[str] = 0
    prompt_tokens: int = 32
    new_tokens: int = 48

    @property
    def sizes(self) -> dict[str, int]:
        """Options of :func:`dofla.evaluate`."""
        return {"batch_size": self.batch_size, "fidelity_windows": self.fidelity_windows}


@dataclass
class ModelSpec:
    """A model of a run. One that is ``end_to_end`` is trained so at last, as the recipe's section of that name says."""

    name: str
    end_to_end: bool = field(default=False, kw_only=True)


@dataclass
class StudentSpec(ModelSpec):
    """A student, one row of the comparison.

    ``budget``, ``lam``, ``normalization`` and ``loss`` are the recipe's where they are not given; ``start`` is how
    features begin: ``data`` (maps that look at data first do so) or ``random``. The rest is as for
    :func:`dofla.linear.allocate`.
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
    trained: bool = True


@dataclass
class Recipe:
    """Settings that compressions and distillations share: the model, its text, training end to end, and evaluation."""

    model: str = ""
    dtype: str | None = None
    device: str | None = None  # cpu, cuda, cuda:1, mps or auto; default cpu
    seeds: list[int] = field(default_factory=lambda: [0])
    data: DataSpec = field(default_factory=DataSpec)
    validation: DataSpec = field(default_factory=lambda: DataSpec(split="validation"))
    end_to_end: EndToEndSpec = field(default_factory=EndToEndSpec)
    evaluate: EvaluateSpec = field(default_factory=EvaluateSpec)
    track: list[str] = field(default_factory=list)  # where losses go as well: tensorboard, wandb, ...

    @property
    def models(self) -> Sequence[ModelSpec]:
        """The models to make."""
        return []

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
        """A recipe from plain data, of the kind that it is; what is not given keeps its default."""
        if cls is Recipe:
            kind = Distillation if "students" in data else Compression
            return kind.from_dict(data, where)  # type: ignore[return-value] # of either kind
        data = dict(data)
        if not data.get("model"):
            raise DoflaError(f"{where}: 'model' is missing: give a folder, a hub name, or demo")
        if "validation" not in data and isinstance(data.get("data"), dict):
            data["validation"] = data["data"] | {"split": "validation"}
        recipe = build(cls, data, where)
        if not recipe.seeds:
            raise DoflaError(f"{where}: 'seeds' is empty: give at least one")
        if min(recipe.seeds) < 0:
            raise DoflaError(f"{where}: 'seeds' has {min(recipe.seeds)}: give 0 or more")
        numbers = {name: value for name, value in vars(recipe.evaluate).items() if name != "prompts"}
        with about(f"{where}: 'evaluate'"):
            check_numbers(**numbers)
            if isinstance(prompts := recipe.evaluate.prompts, int) and prompts < 0:
                raise DoflaError(f"prompts is {prompts}: give texts, how many, or 0 for none")
        return recipe

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` reads back."""
        return asdict(self)


@dataclass
class Compression(Recipe):
    """A compressed cache, by :func:`dofla.calibrate` and :func:`dofla.compress`, whose options these are. Calibration
    takes the first 6,144 tokens of ``data``. If ``end_to_end.steps`` are given, the model is trained with its cache.
    """

    size: int | str | None = None
    ratio: float | None = None
    context: int | None = None
    head_budgets: str = "measured"
    retrieval_heads: int | str = "auto"
    keep_softmax: list[str] = field(default_factory=list)
    prefill: str = "exact"
    evict: bool = True
    bits: float = 3.0

    @property
    def models(self) -> list[ModelSpec]:
        return [ModelSpec("Compressed", end_to_end=self.end_to_end.steps > 0)]

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str = "the recipe") -> Self:
        _refuse(data, Distillation, cls, f"{where}: there are no students, so this is a compression")
        if "prefill" in data:
            data = data | {"prefill": known_prefill(data["prefill"])}
        return super().from_dict(data, where)


@dataclass
class Distillation(Recipe):
    """Students with feature maps, compared: their profile and error curves, budget and training."""

    budget: int = 64
    lam: float = DEFAULT_LAMBDA  # written `lambda` in YAML
    profile: ProfileSpec = field(default_factory=ProfileSpec)
    curves: CurvesSpec = field(default_factory=CurvesSpec)
    students: list[StudentSpec] = field(default_factory=lambda: [StudentSpec()])
    distill: DistillSpec = field(default_factory=DistillSpec)

    @property
    def models(self) -> list[StudentSpec]:
        return self.students

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str = "the recipe") -> Self:
        _refuse(data, Compression, cls, f"{where}: there are students, so this is a distillation")
        data = dict(data)
        if "lambda" in data:
            data["lam"] = data.pop("lambda")
        if data.get("students") is None:
            data.pop("students", None)
        elif not isinstance(data["students"], list) or not data["students"]:
            raise DoflaError(f"{where}: 'students' must be a list of at least one student")
        recipe = super().from_dict(data, where)
        folders: dict[str, str] = {}
        for student in recipe.students:
            if not (folder := slug(student.name)):
                raise DoflaError(f"{where}: student {student.name!r}: the name needs a letter of a to z or a digit")
            if folder in folders:
                raise DoflaError(
                    f"{where}: students {folders[folder]!r} and {student.name!r} would share the folder {folder}: "
                    "names must differ in letters or digits"
                )
            folders[folder] = student.name
        for student in recipe.students:
            if student.start not in ("data", "random"):
                raise DoflaError(f"{where}: student {student.name}: start is {student.start!r}: choose data or random")
            if student.end_to_end and not recipe.end_to_end.steps:
                raise DoflaError(
                    f"{where}: student {student.name} is end_to_end, and end_to_end.steps is 0: give 1 or more"
                )
        return recipe

    def to_dict(self) -> dict[str, Any]:
        data = super().to_dict()
        data["lambda"] = data.pop("lam")
        return data


def _refuse(data: dict[str, Any], other: type[Recipe], own: type[Recipe], reason: str) -> None:
    """DoflaError for a field that only recipes of the other kind have."""
    theirs = {x.name for x in fields(other)} - {x.name for x in fields(own)}
    if found := [name for name in data if name in theirs or (name == "lambda" and "lam" in theirs)]:
        raise DoflaError(f"{reason}, which has no field {found[0]!r}")


def demo_recipes(changes: list[str] | None = None) -> dict[str, Recipe]:
    """The two recipes of the demo by kind, with changes written ``kind.field=value``; DoflaError naming a change or
    field that is unknown, or of the wrong kind."""
    data = {kind: read_yaml(RECIPES / f"demo-{kind}.yaml") for kind in DEMO}
    for change in changes or []:
        if change.partition(".")[0] not in DEMO:
            raise DoflaError(f"--set {change!r}: begin with {' or '.join(f'{kind}.' for kind in DEMO)}")
        apply_change(data, change)
    return {kind: Recipe.from_dict(own, f"demo-{kind}.yaml") for kind, own in data.items()}


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
