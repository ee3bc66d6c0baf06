"""Tasks from JSONL files, so that they work without a hub."""

import re
from pathlib import Path
from typing import Any

from dofla.data.documents import json_lines
from dofla.errors import DoflaError, check_choice
from dofla.tasks.items import Item, Task
from dofla.tasks.styles import STYLES, style_of

ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
"""Endings of a task's file."""


def load_task(path: str | Path, *, name: str | None = None, style: str | None = None) -> Task:
    """A task from a JSONL file, plain or gzipped.

    Each line is an object with ``question``, ``choices`` (two or more texts) and ``answer`` (the index of the right
    one), and perhaps ``context``, ``subject`` and ``id``.

    Args:
        path: ``NAME.jsonl``, ``NAME-test.jsonl.gz``, ...
        name: of the task; default what the file is called, less ``-test``, ``-train`` or ``-validation``.
        style: how items become text; default that of the known task of this name, or what the items look like.

    Raises:
        DoflaError: naming the file and the line.
    """
    path = Path(path)
    name = name or re.sub(r"(-test|-train|-validation)?(\.jsonl?)?(\.gz)?$", "", path.name)
    if style is not None:
        check_choice("style", style, STYLES)
    if not path.exists():
        raise DoflaError(f"task file {path} does not exist")
    items = [_item(data, f"{path}, line {number}", number - 1) for number, data in json_lines(path)]
    if not items:
        raise DoflaError(f"task file {path} holds no items: it needs one JSON object a line")
    return Task(name, style or style_of(name, [item.question for item in items]), items)


def _item(data: dict[str, Any], where: str, number: int) -> Item:
    missing = [key for key in ("question", "choices", "answer") if key not in data]
    if missing:
        raise DoflaError(f"{where}: {missing[0]!r} is missing: an item has question, choices and answer")
    question, choices, answer = data["question"], data["choices"], data["answer"]
    if not isinstance(question, str):
        raise DoflaError(f"{where}: question is {question!r}: give a text")
    if not (isinstance(choices, list) and len(choices) >= 2 and all(isinstance(c, str) and c for c in choices)):
        raise DoflaError(f"{where}: choices is {choices!r}: give two texts or more")
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise DoflaError(f"{where}: answer is {answer!r}: give the index of the right choice, 0 to {len(choices) - 1}")
    texts = data.get("context"), data.get("subject")
    for key, value in zip(("context", "subject"), texts, strict=True):
        if value is not None and not isinstance(value, str):
            raise DoflaError(f"{where}: {key} is {value!r}: give a text")
    return Item(question, tuple(choices), answer, data.get("id", number), *texts)
