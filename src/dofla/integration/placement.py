"""Windows at other positions than they have: for converted models that will read more than the windows they are made
from.

Features and codes see rotary positions through the queries and keys, and what was shown the first L of them alone
misjudges keys beyond: on SmolLM2, trained on 512 tokens, features have a loss increase of .58 nats at 2,048 without
context and of .14 with it, and codes measured on the first 512 positions a KL of 1.5 nats at 6,000.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofla.data import Images, TokenWindows, batches
from dofla.errors import DoflaError
from dofla.integration.converted import Converted
from dofla.integration.positions import check_context, is_rotary, positions_of

REACH = 4
"""Lengths of a window that hybrid converted models are trained for if nothing is said."""
_CROWDED = 2
"""Power with which the position of a window grows with its number: above 1, windows stand closer together at the first
positions, which every text has."""


def context_of(converted: Converted, windows: TokenWindows | Images, context: int | None) -> int | None:
    """The number of positions to read the windows at: ``context``, or by default :data:`REACH` times their length where
    the model is a hybrid language model with rotary positions. None: windows stay where they are, here and below.
    DoflaError if windows cannot be read anywhere among so many positions."""
    if context is not None:
        return _within(converted.model, windows, context)
    model, plan = converted.model, converted.plan
    hybrid = plan.compressed or any(window or sinks for layer in plan.linear for _, window, sinks in layer.sizes)
    if not (hybrid and model.can_generate() and is_rotary(model) and isinstance(windows, TokenWindows)):
        return None
    context = min(REACH * windows.length, positions_of(model) or REACH * windows.length)
    return context if context > windows.length else None


def calibration_context(model: PreTrainedModel, windows: TokenWindows | Images, context: int | None) -> int | None:
    """The number of positions to calibrate codes over, as :func:`context_of`; but by default all that the model has,
    where they are rotary."""
    if context is not None:
        return _within(model, windows, context)
    if not (isinstance(windows, TokenWindows) and is_rotary(model)):
        return None
    context = positions_of(model) or 0
    return context if context > windows.length else None


def _within(model: PreTrainedModel, windows: TokenWindows | Images, context: int) -> int | None:
    if not isinstance(windows, TokenWindows):
        raise DoflaError(f"context is {context}: images have no positions to move; leave it out")
    if context < windows.length:
        raise DoflaError(
            f"context is {context}, less than the windows' {windows.length} tokens: give more, or leave it out"
        )
    check_context(context, positions_of(model))
    # Rotary positions are relative: the original does not notice where a window stands. Others are learned one by one.
    if context > windows.length and not is_rotary(model):
        raise DoflaError(f"context is {context}: {type(model).__name__} has no rotary positions; leave it out")
    return None if context == windows.length else context


def placed(batch: Mapping[str, Tensor], first: int | Tensor) -> dict[str, Tensor]:
    """The batch, its windows [B, L] beginning at position ``first``, or each at one of its own [B]."""
    ids = batch["input_ids"]
    first = torch.as_tensor(first, device=ids.device).expand(len(ids))
    return {**batch, "position_ids": first[:, None] + torch.arange(ids.shape[1], device=ids.device)}


def placed_over(windows: TokenWindows | Images, batch_size: int, context: int | None) -> Iterator[dict[str, Tensor]]:
    """Batches of the windows one after the other, each window at a place of its own: the first at the first position,
    the last at the last that leaves room for it among ``context``."""
    count = len(windows)
    for part in batches(windows, batch_size):
        batch = windows.batch(part)
        if context is not None and isinstance(windows, TokenWindows):
            share = torch.tensor(part, dtype=torch.float64) / max(count - 1, 1)
            batch = placed(batch, ((context - windows.length) * share**_CROWDED).long())
        yield batch


def placed_anywhere(batch: dict[str, Tensor], context: int | None, generator: torch.Generator) -> dict[str, Tensor]:
    """The batch at a position drawn from those that leave room for it among ``context``."""
    if context is None:
        return batch
    room = context - batch["input_ids"].shape[1]
    return placed(batch, int(torch.randint(room + 1, (), generator=generator)))


def placed_evenly(batch: dict[str, Tensor], context: int | None) -> list[dict[str, Tensor]]:
    """The batch at the first, the last, and two positions between them."""
    if context is None:
        return [batch]
    room = context - batch["input_ids"].shape[1]
    return [placed(batch, room * n // 3) for n in range(4)]
