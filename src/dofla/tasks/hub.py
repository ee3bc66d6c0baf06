"""The paper's seven tasks from the hub, through ``datasets``: the sets that lm-evaluation-harness takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from dofla.errors import DoflaError
from dofla.tasks.items import Item, Task
from dofla.tasks.styles import KNOWN

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
    """One of the paper's tasks.

    Args:
        name: in :data:`HUB`.
        split: ``test`` (the validation set, where the test set has no answers) or ``train``.

    Raises:
        DoflaError: another name, a split the task does not have, no ``datasets``, or no way to the hub.
    """
    if name not in HUB:
        raise DoflaError(f"unknown task {name!r}: choose one of {', '.join(HUB)}, or give a JSONL file")
    source = HUB[name]
    if split not in source.splits:
        raise DoflaError(f"task {name} has no {split} split on the hub: it has {', '.join(source.splits)}")
    try:
        import datasets
    except ImportError as error:
        raise DoflaError(f'task {name} comes from the hub through datasets: pip install "dofla[data]"') from error
    try:
        rows: Iterable[Row] = datasets.load_dataset(source.path, source.config, split=source.splits[split])
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        where = f"task {name} ({source.path})"
        raise DoflaError(f"cannot load {where} from the hub: {reason}; give a JSONL file instead") from error
    return Task(name, KNOWN[name], [source.item(row, number) for number, row in enumerate(rows)])
