"""What both environments share of RULER's questions: what is asked about contexts, what a memory answers, and what it
scores, a line each. Nothing of dofla.

A context is read before anyone asks, once; the question, which follows on it, finds what is remembered.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import torch
from judging import write_json, write_text
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

ASKED = "asked.json"
"""The file that says what is asked, and how many bytes memories may take."""
FOUND = "found.jsonl"
"""The file of scores."""


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

    @cached_property
    def digest(self) -> str:
        """Of all that is asked."""
        return sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Task:
    """A task of RULER: its name, and contexts."""

    name: str
    contexts: list[Context]


@dataclass(frozen=True)
class Found:
    """What a memory scored.

    Attributes:
        memory: its name.
        limit: the bytes that it was to take at most; 0 where there was no choice.
        task: its name.
        context: the digest of the context.
        bytes: that it holds after the context.
        score: the share of the answers.
    """

    memory: str
    limit: int
    task: str
    context: str
    bytes: int
    score: float


Known = dict[tuple[str, int], dict[str, Found]]
"""By memory and limit, and by the digest of the context."""


def read_found(folder: Path) -> Known:
    """All that was measured."""
    path, known = folder / FOUND, {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        found = Found(**json.loads(line))
        known.setdefault((found.memory, found.limit), {})[found.context] = found
    return known


def measured(folder: Path, context: Context) -> set[tuple[str, int]]:
    """Memories and limits that were measured on a context."""
    return {memory for memory, own in read_found(folder).items() if context.digest in own}


def add_found(folder: Path, found: Iterable[Found]) -> None:
    """To what was measured, all or nothing."""
    path = folder / FOUND
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    write_text(path, before + "".join(f"{json.dumps(asdict(own))}\n" for own in found))


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
