"""Where a task's training and test items come from."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from dofla.errors import DoflaError
from dofla.tasks import Item, Task, load_task
from dofla.tasks.hub import HUB, hub_task
from dofla.tasks.reading import ENDINGS, task_file


def train_and_test(
    task: str, test: str | Path | None = None, folder: str | Path | None = None, *, style: str | None = None
) -> tuple[Task, Task, str]:
    """Training items, test items, and in words where they are from.

    Where there is one set only, the items whose id has a hash divisible by 5 are held out: the same in every run.

    Args:
        task: a JSONL file to learn; or a name that has ``NAME-train.jsonl``, ``NAME-test.jsonl`` (either may be
            gzipped) or both in ``folder``; or one of the paper's tasks, which comes from the hub then.
        test: a JSONL file to test on, over the one in ``folder``.
        folder: of the tasks given by name; default the current one.
        style: how items become text; default that of a known task of this name, or what the items look like.

    Raises:
        DoflaError: no such file, or a damaged one; too few items to hold some out.
    """
    is_file = task.endswith(ENDINGS)
    learned = Path(task) if is_file else task_file(folder or ".", f"{task}-train")
    tested = None if is_file else task_file(folder or ".", f"{task}-test")
    if test is not None:
        tested = Path(test)
    if learned is None and tested is None and folder is None and task in HUB:
        return from_hub(task)
    if learned is not None and tested is not None:
        train = load_task(learned, style=style)
        return train, load_task(tested, name=train.name, style=train.style), f"{learned} to learn, {tested} to test"
    only = learned or (tested if test is None else None)
    if only is None:
        raise DoflaError(f"no {task}-train.jsonl or {task}-train.jsonl.gz in {folder or '.'}: give --tasks-folder")
    return *split(load_task(only, style=style)), f"{only}: a fifth held out to test, by the hash of the ids"


def from_hub(name: str) -> tuple[Task, Task, str]:
    """The same for one of the paper's tasks, from the hub."""
    where = f"{HUB[name].path} on the hub"
    if "train" in HUB[name].splits:
        return hub_task(name, "train"), hub_task(name), where
    return *split(hub_task(name)), f"{where}: a fifth of its test set held out to test, by the hash of the ids"


def split(task: Task) -> tuple[Task, Task]:
    """About four fifths of the items, and a fifth; which is which depends on their ids alone."""
    parts: tuple[list[Item], list[Item]] = [], []
    for item in task.items:
        digest = hashlib.blake2b(str(item.id).encode(), digest_size=8).digest()
        parts[int.from_bytes(digest, "big") % 5 == 0].append(item)
    if not all(parts):
        raise DoflaError(f"task {task.name}: {len(task.items)} items are too few to hold some out: give --test FILE")
    return replace(task, items=parts[0]), replace(task, items=parts[1])
