"""What both environments share of questions: what is asked about contexts, what a memory answers, and what it scores, a
file each. Nothing of dofla.

A context is read before anyone asks, once; each question then goes on from a copy of what is remembered of it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from judging import write_json
from transformers import Cache, PreTrainedModel

ASKED = "asked.json"
"""The file that says what is asked, and how many bytes memories may take."""


@dataclass(frozen=True)
class Question:
    """``ids`` follow on the context; then comes the answer, within ``room`` tokens, in which all ``answers`` should
    stand."""

    ids: list[int]
    answers: list[str]
    room: int

    def score(self, written: str) -> float:
        """Share of the answers that stand in what was written."""
        return sum(answer.lower() in written.lower() for answer in self.answers) / len(self.answers)


@dataclass(frozen=True)
class Context:
    """Tokens, and what is asked of them."""

    ids: list[int]
    questions: list[Question]


@dataclass(frozen=True)
class Task:
    """Contexts of one kind, written by one template, of one length in tokens."""

    kind: str
    template: str
    length: int
    contexts: list[Context]


@dataclass
class Found:
    """What a memory scored.

    Attributes:
        memory: its name.
        limit: the bytes that it was to take at most; 0 where there was no choice.
        kind, template, length: of the :class:`Task`.
        bytes: that it holds after a context, at most.
        scores: of the questions of each context.
    """

    memory: str
    limit: int
    kind: str
    template: str
    length: int
    bytes: int
    scores: list[list[float]]

    @property
    def mean(self) -> float:
        return sum(map(sum, self.scores)) / sum(map(len, self.scores))

    def of(self, task: Task) -> bool:
        """Whether it is about these questions, as far as one can see."""
        same = (self.kind, self.template, self.length) == (task.kind, task.template, task.length)
        return same and len(self.scores) == len(task.contexts)

    def write(self, folder: Path) -> None:
        """Into a file of its own, whole or not there."""
        name = f"{self.memory}, {self.limit}, {self.kind}, {self.template}, {self.length}"
        write_json(folder / f"{name}.json", asdict(self))


def read_found(folder: Path, task: Task) -> dict[tuple[str, int], Found]:
    """Of a task, by memory and limit."""
    paths = [path for path in sorted(folder.glob("*.json")) if path.name != ASKED]
    there = [Found(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    return {(found.memory, found.limit): found for found in there if found.of(task)}


def write_tasks(folder: Path, tasks: list[Task], limits: list[int]) -> None:
    """What is asked, for both environments, and the bytes that memories may take."""
    write_json(folder / ASKED, {"limits": limits, "tasks": [asdict(task) for task in tasks]})


def read_tasks(folder: Path) -> tuple[list[Task], list[int]]:
    """What :func:`write_tasks` wrote."""
    known = json.loads((folder / ASKED).read_text(encoding="utf-8"))
    for task in known["tasks"]:
        task["contexts"] = [Context(x["ids"], [Question(**y) for y in x["questions"]]) for x in task["contexts"]]
    return [Task(**task) for task in known["tasks"]], known["limits"]


@torch.no_grad()
def write(
    model: PreTrainedModel, cache: Cache, ids: list[int], at: int, room: int, *, chunk: int | None = None
) -> list[int]:
    """What a model writes, greedily, after the tokens ``ids`` that follow on ``at`` others: ``room`` tokens.

    ``ids`` are read in calls of ``chunk`` tokens; the ``cache`` may hold fewer tokens than were read.
    """
    written: list[int] = []
    pieces = list(torch.tensor([ids]).split(chunk or len(ids), dim=1))
    while len(written) < room:
        for piece in pieces:
            places = torch.arange(at, at + piece.shape[1])[None]
            logits = model(piece, past_key_values=cache, position_ids=places, logits_to_keep=1).logits[:, -1]
            at += piece.shape[1]
        pieces = [logits.argmax(dim=-1, keepdim=True)]
        written.append(pieces[0].item())
    return written
