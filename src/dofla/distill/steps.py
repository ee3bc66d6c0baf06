"""What the distillation loops share: the batches of a step, and the checks of their options."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from dofla.data import Images, TokenWindows
from dofla.errors import DoflaError


def batches_of_step(
    windows: TokenWindows | Images, batch_size: int, accumulate: int, seed: int, step: int
) -> list[dict[str, Tensor]]:
    """The batches of one step: a function of seed and step alone, so a resumed run sees the same ones.

    Each epoch takes every window once; its last step may have fewer, and a smaller last batch.
    """
    per_step = batch_size * accumulate
    epoch, place = divmod(step, math.ceil(len(windows) / per_step))
    order = torch.randperm(len(windows), generator=generator_of(seed, epoch))
    return [windows.batch(chosen) for chosen in order[place * per_step : (place + 1) * per_step].split(batch_size)]


def generator_of(seed: int, number: int) -> torch.Generator:
    """A CPU generator for one epoch or step of a run."""
    return torch.Generator().manual_seed(seed * 1_000_003 + number)


def check_enough(windows: TokenWindows | Images, per_step: int) -> None:
    """DoflaError unless there are windows for one step."""
    if len(windows) < per_step:
        raise DoflaError(f"{len(windows)} windows are too few for one step of {per_step}: give more text or less batch")


def check_numbers(**numbers: int) -> None:
    """DoflaError naming the first that is below 1."""
    for name, value in numbers.items():
        if value < 1:
            raise DoflaError(f"{name} is {value}: give 1 or more")


def check_choice(what: str, value: str, known: Iterable[str]) -> None:
    """DoflaError listing what is ``known`` unless ``value`` is one of it."""
    if value not in known:
        raise DoflaError(f"unknown {what} {value!r}: choose one of {', '.join(sorted(known))}")
