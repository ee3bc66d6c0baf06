"""Items of the paper's seven tasks: from JSONL files, or from the hub, of the sets that lm-evaluation-harness takes."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dofla.errors import DoflaError, first_line
from dofla.paper.study import TasksSpec
from dofla.runs.demo import TASKS
from dofla.storage.extras import extra
from dofla.tasks import KNOWN, Item, Task, load_task
from dofla.tasks.reading import ENDINGS

Row = Mapping[str, Any]


class _Set(NamedTuple):
    """Where a task is, which of its splits have answers, and how a row becomes an item."""

    path: str
    config: str | None
    splits: dict[str, str]
    item: Callable[[Row, int], Item]


def _piqa(row: Row, number: int) -> Item:
    return Item(row["goal"], (row["sol1"], row["sol2"]), row["label"], number)


def _logiqa(row: Row, number: int) -> Item:
    return Item(row["question"], tuple(row["options"]), "abcd".index(row["label"].strip()), number, row["context"])


def _arc(row: Row, number: int) -> Item:
    choices = row["choices"]
    return Item(row["question"], tuple(choices["text"]), choices["label"].index(row["answerKey"]), row["id"])


def _winogrande(row: Row, number: int) -> Item:
    return Item(row["sentence"], (row["option1"], row["option2"]), int(row["answer"]) - 1, number)


def _wsc273(row: Row, number: int) -> Item:
    text, start = row["text"], row["pronoun_loc"]
    sentence = f"{text[:start]}_{text[start + len(row['pronoun']) :]}"
    # A possessive pronoun stands for a possessive.
    owner = "'s" if row["pronoun"].lower() in ("my", "his", "her", "our", "their") else ""
    return Item(sentence, tuple(option + owner for option in row["options"]), row["label"], number)


def _mmlu(row: Row, number: int) -> Item:
    return Item(row["question"].strip(), tuple(row["choices"]), row["answer"], number, subject=row["subject"])


HUB: dict[str, _Set] = {
    "piqa": _Set("baber/piqa", None, {"train": "train", "test": "validation"}, _piqa),
    "logiqa": _Set("EleutherAI/logiqa", "logiqa", {"train": "train", "test": "test"}, _logiqa),
    "arc_easy": _Set("allenai/ai2_arc", "ARC-Easy", {"train": "train", "test": "test"}, _arc),
    "arc_challenge": _Set("allenai/ai2_arc", "ARC-Challenge", {"train": "train", "test": "test"}, _arc),
    "winogrande": _Set("allenai/winogrande", "winogrande_xl", {"train": "train", "test": "validation"}, _winogrande),
    "wsc273": _Set("lighteval/winograd_wsc", "wsc273", {"test": "test"}, _wsc273),
    "mmlu": _Set("cais/mmlu", "all", {"train": "auxiliary_train", "test": "test"}, _mmlu),
}


def hub_task(name: str, split: str = "test") -> Task:
    """One of the paper's tasks, its ``test`` items (of the validation set, where the test set has no answers) or its
    ``train`` items; DoflaError for another name, without ``datasets``, or without a way to the hub."""
    if name not in HUB:
        raise DoflaError(f"unknown task {name!r}: choose one of {', '.join(HUB)}, or give a folder of JSONL files")
    source, datasets = HUB[name], extra("datasets", "data", f"task {name} of the hub")
    try:
        rows: Iterable[Row] = datasets.load_dataset(source.path, source.config, split=source.splits[split])
    except (OSError, ValueError, RuntimeError) as error:
        what = f"cannot load task {name} ({source.path}) from the hub: {first_line(error)}"
        raise DoflaError(f"{what}; give a folder of JSONL files") from error
    return Task(name, KNOWN[name], [source.item(row, number) for number, row in enumerate(rows)])


def task_file(folder: str | Path, stem: str) -> Path | None:
    """``STEM.jsonl`` or ``STEM.jsonl.gz`` in ``folder``; None if there is neither."""
    return next((path for ending in ENDINGS if (path := Path(folder) / f"{stem}{ending}").is_file()), None)


def tasks_of(spec: TasksSpec) -> list[Task]:
    """The tasks to score on. DoflaError if the study names none and their source is not ``demo``."""
    if spec.source == "demo":
        found = [load_task(path) for path in sorted(TASKS.glob("*-test.jsonl.gz"))]
        return [task.take(spec.items) for task in found if not spec.names or task.name in spec.names]
    if not spec.names:
        raise DoflaError('the study names no tasks: --set "tasks.names=[arc_easy, ...]"')
    found = []
    for name in spec.names:
        path = None if spec.source == "hub" else task_file(spec.source, f"{name}-test")
        if path is None and spec.source != "hub":
            raise DoflaError(f"{spec.source} has no {name}-test.jsonl(.gz): --set tasks.source=FOLDER")
        found.append((load_task(path) if path else hub_task(name)).take(spec.items))
    return found


def train_and_test(name: str, source: str) -> tuple[Task, Task]:
    """Items to fine-tune on and to test on: of ``hub``, of ``demo``, or ``NAME-train.jsonl`` and ``NAME-test.jsonl``
    (or .gz) of a folder. Of a single set, the items whose id has a hash divisible by 5 are the test, in every run."""
    if source == "hub":
        sets = [hub_task(name, split) for split in HUB[name].splits]
    else:
        folder = TASKS if source == "demo" else source
        files = [task_file(folder, f"{name}-{split}") for split in ("train", "test")]
        sets = [load_task(path, name=name) for path in files if path]
    if not sets:
        raise DoflaError(f"{source} has no {name}-train.jsonl or {name}-test.jsonl (or .gz)")
    if len(sets) == 2:
        return sets[0], replace(sets[1], style=sets[0].style)
    parts: tuple[list[Item], list[Item]] = [], []
    for item in sets[0].items:
        digest = hashlib.blake2b(str(item.id).encode(), digest_size=8).digest()
        parts[int.from_bytes(digest, "big") % 5 == 0].append(item)
    if not all(parts):
        raise DoflaError(f"task {name}: {len(sets[0].items)} items are too few to hold some out")
    return replace(sets[0], items=parts[0]), replace(sets[0], items=parts[1])
