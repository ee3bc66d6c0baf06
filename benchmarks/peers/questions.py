"""What both environments share of RULER's questions: what is asked about contexts, what a memory answers, and what it
scores, a file each. Nothing of dofla.

A context is read before anyone asks, once; the question, which follows on it, finds what is remembered.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from statistics import fmean

import torch
from judging import write_json
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

ASKED = "asked.json"
"""The file that says what is asked, and how many bytes memories may take."""


@dataclass(frozen=True)
class Context:
    """The tokens ``ids``, on which those of a ``question`` follow; then comes the answer, within ``room`` tokens, in
    which all ``answers`` should stand."""

    ids: list[int]
    question: list[int]
    answers: list[str]
    room: int

    def score(self, written: str) -> float:
        """RULER's string match: the share of the answers that stand in what was written, whatever their case."""
        return sum(answer.lower() in written.lower() for answer in self.answers) / len(self.answers)


@dataclass(frozen=True)
class Task:
    """A task of RULER: its name, and contexts."""

    name: str
    contexts: list[Context]

    @cached_property
    def digest(self) -> str:
        """Of all that is asked."""
        return sha256(json.dumps(asdict(self)).encode()).hexdigest()


@dataclass
class Found:
    """What a memory scored.

    Attributes:
        memory: its name.
        limit: the bytes that it was to take at most; 0 where there was no choice.
        task, digest: of the :class:`Task`.
        bytes: that it holds after a context, at most.
        scores: of the contexts.
    """

    memory: str
    limit: int
    task: str
    digest: str
    bytes: int
    scores: list[float]

    @property
    def mean(self) -> float:
        return fmean(self.scores)

    def write(self, folder: Path) -> None:
        """Into a file of its own, whole or not there."""
        write_json(folder / f"{self.memory}, {self.limit}, {self.task}, {self.digest[:8]}.json", asdict(self))


def read_found(folder: Path, task: Task) -> dict[tuple[str, int], Found]:
    """Of a task, by memory and limit."""
    paths = [path for path in sorted(folder.glob("*.json")) if path.name != ASKED]
    there = [Found(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    return {(found.memory, found.limit): found for found in there if found.digest == task.digest}


def write_tasks(folder: Path, tasks: list[Task], limits: list[int]) -> None:
    """What is asked, for both environments, and the bytes that memories may take."""
    write_json(folder / ASKED, {"limits": limits, "tasks": [asdict(task) for task in tasks]})


def read_tasks(folder: Path) -> tuple[list[Task], list[int]]:
    """What :func:`write_tasks` wrote."""
    known = json.loads((folder / ASKED).read_text(encoding="utf-8"))
    tasks = [Task(task["name"], [Context(**context) for context in task["contexts"]]) for task in known["tasks"]]
    return tasks, known["limits"]


@torch.no_grad()
def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: Cache,
    context: Context,
    *,
    chunk: int | None = None,
) -> float:
    """What a model scores whose ``cache`` has what is remembered of a context, be it of fewer tokens.

    The question is read in calls of ``chunk`` tokens. The answer is written greedily until the model ends it, there is
    no room, or the score cannot change any more.
    """
    ends, at, written = model.generation_config.eos_token_id, len(context.ids), []
    ends = ends if isinstance(ends, list) else [ends]
    pieces = list(torch.tensor([context.question]).split(chunk or len(context.question), dim=1))
    while len(written) < context.room:
        for piece in pieces:
            places = torch.arange(at, at + piece.shape[1])[None]
            logits = model(piece, past_key_values=cache, position_ids=places, logits_to_keep=1).logits[:, -1]
            at += piece.shape[1]
        pieces = [logits.argmax(dim=-1, keepdim=True)]
        written.append(pieces[0].item())
        if written[-1] in ends or context.score(tokenizer.decode(written)) == 1:
            break
    return context.score(tokenizer.decode(written))
