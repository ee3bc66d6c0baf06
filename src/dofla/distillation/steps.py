"""The common part of the distillation loops: the batches of a step."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dofla.data import Images, TokenWindows
from dofla.errors import DoflaError
from dofla.integration.placement import placed_anywhere, placed_evenly


@dataclass(frozen=True)
class Batches:
    """The batches of every step: a function of the seed and the step alone, so that a resumed run sees the same ones.

    Each epoch takes every window once; its last step may have fewer, and a smaller last batch. DoflaError if there are
    fewer windows than one step takes.

    Attributes:
        batch_size: windows per batch, of all processes together.
        accumulate: batches per step.
        context: number of positions among which each batch is read (:func:`dofla.integration.placement.context_of`).
    """

    windows: TokenWindows | Images
    batch_size: int
    accumulate: int
    seed: int
    context: int | None

    def __post_init__(self) -> None:
        if len(self.windows) < self.per_step:
            few, needed = len(self.windows), self.per_step
            raise DoflaError(f"{few} windows are too few for one step of {needed}: give more text or less batch")

    @property
    def per_step(self) -> int:
        """Windows of a step."""
        return self.batch_size * self.accumulate

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch."""
        return math.ceil(len(self.windows) / self.per_step)

    def of_step(self, step: int, places: torch.Generator | None = None) -> list[dict[str, Tensor]]:
        """Batches of a step, at places drawn by a generator, or by the step's own."""
        places = places or generator_of(self.seed, step)
        return [placed_anywhere(batch, self.context, places) for batch in self._where_they_are(step)]

    def first(self) -> list[dict[str, Tensor]]:
        """The first batch of all, at several places within the context."""
        return placed_evenly(self._where_they_are(0)[0], self.context)

    def _where_they_are(self, step: int) -> list[dict[str, Tensor]]:
        epoch, place = divmod(step, self.per_epoch)
        order = torch.randperm(len(self.windows), generator=generator_of(self.seed, epoch))
        chosen = order[place * self.per_step : (place + 1) * self.per_step]
        return [self.windows.batch(part) for part in chosen.split(self.batch_size)]


def generator_of(seed: int, number: int) -> torch.Generator:
    """A CPU generator for one epoch or step of a run."""
    return torch.Generator().manual_seed(seed * 1_000_003 + number)
