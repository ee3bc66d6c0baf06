"""Tables 3 and 6: accuracy on multiple-choice tasks, zero-shot and after fine-tuning, paired with the original's."""

import copy
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofla.paper import published
from dofla.paper.bench import Bench
from dofla.paper.finetune import finetune, settings_for
from dofla.paper.items import train_and_test
from dofla.paper.methods import baselines, paper_methods, trained, wide
from dofla.paper.table import Cell, Figure, Table
from dofla.runs.recipe import StudentSpec
from dofla.storage.fields import build
from dofla.tasks import Metric, TaskScores, compare, score

_DRAWS = 2000  # of a bootstrap


def task_accuracy(bench: Bench) -> Table:
    """Table 3: every method on every task."""
    teacher = _scores(bench)
    names = [scores.task for scores in teacher]
    finetuned = bench.study.finetune.tasks
    columns = ["model", "average", *names, "critical τ", "agreement", *(f"fine-tuned {name}" for name in finetuned)]
    rows: list[list[Cell]] = [["Original", *_accuracies([teacher]), None, None, *_finetuned(bench, None)]]
    # Of DiJiang's two readings that of the public code, which the paper ran.
    others = [spec for spec in baselines() if spec.feature_map != "dijiang"]
    methods = {spec.name: spec for spec in bench.lineup([*others, *paper_methods()])} | {"Wide": wide(bench.students)}
    for spec in (methods[name] for name in methods if name in (bench.study.tasks.methods or methods)):
        several = [_scores(bench, spec, seed) for seed in _seeds(bench)]
        critical = Figure.of([_critical(teacher, scores) for scores in several])
        alike = Figure.of([_agreement(teacher, scores) for scores in several], spread=False)
        rows.append([spec.name, *_accuracies(several), critical, alike, *_finetuned(bench, spec)])
    items = [scores.items for scores in teacher]
    return Table(
        "Table 3: accuracy on multiple-choice tasks",
        columns,
        rows,
        ["GPT-2", "average of seven tasks, fine-tuned"],
        [list(row) for row in published.ACCURACY.items()],
        [
            f"zero-shot likelihood of each choice, {min(items)} to {max(items)} items a task; the standard error of "
            f"a task is up to {max(_acc(scores).stderr or 0 for scores in teacher):.3f}",
            "critical τ: the tolerance at which half the tasks are won or tied against the original; agreement: how "
            "often the same choice is made",
            *_finetuning_note(bench),
        ],
        data={"tasks": names, "items": items},
    )


def dof_against_fixed(bench: Bench) -> Table:
    """Table 6, whose question is whether DoF beats an equal split: paired by item, softmax loss."""
    teacher = _scores(bench)
    shown = [("Performer", baselines()[-1]), *((x, trained(x, "softmax")) for x in ("Fix", "DoF", "DoF + Clip"))]
    scores = {label: [_scores(bench, spec, seed) for seed in _seeds(bench)] for label, spec in shown}
    rows: list[list[Cell]] = [["Original", _accuracies([teacher])[0], *_difference(scores["Fix"], [teacher])]]
    for label, several in scores.items():
        difference = [None, None] if label == "Fix" else _difference(scores["Fix"], several)
        rows.append([label, _accuracies(several)[0], *difference])
    return Table(
        "Table 6: is an allocation by degrees of freedom better than an equal split?",
        ["model", "average", "less Fix", "95 % interval"],
        rows,
        ["Pythia-1B", "average of seven tasks, fine-tuned"],
        [list(row) for row in published.PYTHIA_ACCURACY.items()],
        ["zero-shot, mean over tasks and seeds; the interval resamples items within tasks, paired, all seeds together"],
    )


def _difference(fixed: list[list[TaskScores]], several: list[list[TaskScores]]) -> list[Cell]:
    """The gain in accuracy over the equal split, paired by seed, and its interval."""
    several = several * len(fixed) if len(several) == 1 else several
    gains = [_tensor(b) - _tensor(a) for a, b in zip(chain(*fixed), chain(*several), strict=True)]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([_resampled(gain, generator) for gain in gains]).mean(dim=0)
    low, high = drawn.quantile(torch.tensor([0.025, 0.975], dtype=drawn.dtype)).tolist()
    return [Figure.of(statistics.fmean(gain.mean().item() for gain in gains)), f"{low:+.3f} to {high:+.3f}"]


def _resampled(gains: Tensor, generator: torch.Generator) -> Tensor:
    """Means [draws] over as many items drawn with replacement."""
    drawn = (torch.randint(len(gains), (len(gains),), generator=generator) for _ in range(_DRAWS))
    return torch.stack([gains[items].mean() for items in drawn])


def _critical(teacher: Sequence[TaskScores], student: Sequence[TaskScores]) -> float:
    """The smallest tolerance at which half the tasks are won or tied (α* of arXiv 2603.15590): the loss that half of
    them, rounded up, do not exceed, or 0."""
    losses = sorted(_acc(a).value - _acc(b).value for a, b in zip(teacher, student, strict=True))
    return max(0.0, losses[(len(losses) + 1) // 2 - 1])


def _agreement(teacher: Sequence[TaskScores], student: Sequence[TaskScores]) -> float:
    """Share of items where both choose the same, mean over tasks."""
    return statistics.fmean(compare(*pair).agreement or 0.0 for pair in zip(teacher, student, strict=True))


def _accuracies(several: Sequence[Sequence[TaskScores]]) -> list[Cell]:
    """The average over tasks, and each task."""
    each = [[_acc(scores).value for scores in run] for run in several]
    by_task = [Figure.of(list(values), spread=False) for values in zip(*each, strict=True)]
    return [Figure.of([statistics.fmean(run) for run in each]), *by_task]


def _acc(scores: TaskScores) -> Metric:
    return scores.metrics["acc"]


def _tensor(scores: TaskScores) -> Tensor:
    """Per item [N]: 1 if it is answered rightly, else 0."""
    return torch.tensor(_acc(scores).values, dtype=torch.float64)


def _seeds(bench: Bench) -> list[int]:
    return bench.study.seeds[: bench.study.tasks.seeds]


def _scores(bench: Bench, spec: StudentSpec | None = None, seed: int = 0) -> list[TaskScores]:
    """The scores of a student on the study's tasks; without one, of the original."""

    def measure(model: PreTrainedModel) -> dict[str, Any]:
        tokenizer, size = bench.students.opened.tokenizer, bench.study.tasks.batch_size
        return {"tasks": [asdict(scores) for scores in score(model, tokenizer, bench.tasks, batch_size=size)]}

    record = bench.of(spec, seed, "tasks", measure)
    return [build(TaskScores, scores, "a record of scores") for scores in record["tasks"]]


def _finetuned(bench: Bench, spec: StudentSpec | None) -> list[Cell]:
    """Accuracy on each task after fine-tuning on it; nothing for methods that the study does not fine-tune."""
    wanted, who = bench.study.finetune, spec.name if spec else "Original"
    if who not in wanted.methods:
        return [None] * len(wanted.tasks)

    def accuracy(name: str, seed: int) -> float:
        def measure(model: PreTrainedModel) -> dict[str, Any]:
            return _learned(bench, copy.deepcopy(model), seed, name, who)  # a copy, for it changes the weights

        return bench.of(spec, seed, f"finetuned-{name}{'' if spec else f'-seed{seed}'}", measure)["accuracy"]

    seeds = bench.study.seeds[: wanted.seeds]
    return [Figure.of([accuracy(name, seed) for seed in seeds]) for name in wanted.tasks]


def _learned(bench: Bench, model: PreTrainedModel, seed: int, name: str, who: str) -> dict[str, Any]:
    wanted = bench.study.finetune
    train, test = train_and_test(name, bench.study.tasks.source)
    sets = train.take(wanted.items, seed=seed), test.take(wanted.test_items)
    settings = settings_for(model, name, lora=wanted.lora_rank is not None)
    settings |= {key: value for key in settings if (value := getattr(wanted, key)) is not None}
    options = {"lora_rank": wanted.lora_rank, "seed": seed, **settings}
    with bench.view.progress(f"fine-tune {who} on {name}, seed {seed}") as progress:
        epochs = finetune(model, bench.students.opened.tokenizer, *sets, progress=progress, **options)
    return {"accuracy": max(epochs), "epochs": epochs, "settings": settings}


def _finetuning_note(bench: Bench) -> list[str]:
    spec = bench.study.finetune
    if not spec.tasks:
        return []
    items = f"{spec.items} items" if spec.items else "all training items"
    how = f"LoRA of rank {spec.lora_rank}" if spec.lora_rank else "all weights but the feature maps"
    return [
        f"fine-tuned on {items} ({how}), best epoch, on {spec.test_items or 'all'} test items, {spec.seeds} seed(s); "
        "the zero-shot columns are before that"
    ]
