"""Multiple-choice items, and tasks made of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dofla.errors import DoflaError


@dataclass(frozen=True)
class Item:
    """One question: exactly one of ``choices`` is right, the one at ``answer``.

    Attributes:
        context: a passage the question is about.
        subject: what MMLU names in its instruction.
    """

    question: str
    choices: tuple[str, ...]
    answer: int
    id: int | str = 0
    context: str | None = None
    subject: str | None = None


@dataclass(frozen=True)
class Task:
    """Items that are asked in the same way.

    Attributes:
        name: short, for tables and files.
        style: a name in :data:`dofla.tasks.styles.STYLES`: how an item becomes text.
        items: what is scored.
    """

    name: str
    style: str
    items: Sequence[Item] = field(repr=False)

    def take(self, count: int | None, *, seed: int = 0) -> Task:
        """``count`` items drawn at random, in their order (all, if there are no more); DoflaError if it is below 1."""
        if count is not None and count < 1:
            raise DoflaError(f"{count} items of task {self.name}: take 1 or more")
        if count is None or count >= len(self.items):
            return self
        chosen = sorted(random.Random(seed).sample(range(len(self.items)), count))
        return replace(self, items=[self.items[n] for n in chosen])
