"""Study: what the tables of arXiv 2507.03340 need to know of a model, as a YAML file beside this one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dofla.errors import DoflaError, check_numbers
from dofla.runs.recipe import Distillation, apply_change, read_yaml

STUDIES = Path(__file__).parent / "studies"
SCALES = ("full", "small")


@dataclass
class TasksSpec:
    """Multiple-choice tasks.

    ``source`` is ``demo`` (bundled, for the bundled model), a folder of NAME-test.jsonl(.gz) files, or ``hub`` (the
    tasks of lm-evaluation-harness by name). ``items`` are drawn from each; None takes all. ``seeds`` is how many of
    the study's seeds are asked; None asks all. ``methods`` are the rows of table 3 (``Wide`` for the
    widened one); none given, all of them.
    """

    source: str = "demo"
    names: list[str] = field(default_factory=list)
    items: int | None = 300
    seeds: int | None = None
    methods: list[str] = field(default_factory=list)
    batch_size: int = 16


@dataclass
class FinetuneSpec:
    """Fine-tuning of teacher and students on ``tasks``, by ``methods``, whose names are those of table 3.

    Rates, batch sizes and epochs are the paper's for its models (:func:`dofla.paper.finetune.settings_for`), unless
    given.
    """

    tasks: list[str] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    seeds: int = 1
    items: int | None = None
    test_items: int | None = None
    epochs: int | None = None
    learning_rate: float | None = None
    batch_size: int | None = None
    lora_rank: int | None = None


@dataclass
class CurveSpec:
    """Error against M: ``heads`` of the model, spread over their degrees of freedom, ``draws`` of the features."""

    heads: int = 12
    vectors: int = 256
    sizes: list[int] = field(default_factory=lambda: [8, 16, 32, 64, 128, 256, 512])
    draws: int = 5


@dataclass
class CostSpec:
    """Timing: ``tokens`` are generated, ``steps`` of training are timed."""

    tokens: int = 1000
    steps: int = 5


@dataclass
class Study(Distillation):
    """A distillation (model, budget, text, training), and the measures that only the tables ask for."""

    tasks: TasksSpec = field(default_factory=TasksSpec)
    finetune: FinetuneSpec = field(default_factory=FinetuneSpec)
    curve: CurveSpec = field(default_factory=CurveSpec)
    cost: CostSpec = field(default_factory=CostSpec)

    @classmethod
    def of(cls, model: str, scale: str = "full", seeds: int = 3, changes: list[str] | None = None) -> Study:
        """The study of a model that has one by name; any other model gets ``any.yaml``.

        Args:
            model: ``demo``, ``gpt2``, ``pythia-1b``, ``smollm2-135m``, ``minilm``; or a folder or hub name.
            scale: ``full``, or what the file's ``small`` section says instead.
            seeds: how many, from 0; DoflaError below 1.
            changes: ``section.field=value``, applied last.
        """
        if scale not in SCALES:
            raise DoflaError(f"unknown scale {scale!r}: choose {' or '.join(SCALES)}")
        check_numbers(seeds=seeds)
        path = STUDIES / f"{model}.yaml"
        data = read_yaml(path if path.exists() else STUDIES / "any.yaml")
        small = data.pop("small", {})
        if scale == "small":
            data = _merged(data, small)
        data.setdefault("model", model)
        data["seeds"] = list(range(seeds))
        for change in changes or []:
            apply_change(data, change)
        return cls.from_dict(data, path.name)


def _merged(data: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(data)
    for key, value in over.items():
        merged[key] = _merged(merged[key], value) if isinstance(value, dict) and key in merged else value
    return merged
