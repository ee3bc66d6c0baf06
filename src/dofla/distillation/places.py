"""Windows at other positions than they have: for students that will read more than the windows they are trained on.

Features see rotary positions through the queries and keys, and a map that training showed the first L of them alone
misjudges keys beyond: on SmolLM2, trained on 512 tokens, the gap at 2,048 is .58 nats without a reach and .14 with it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofla.data import Images, TokenWindows
from dofla.errors import DoflaError
from dofla.integration.surgery import linear_layers

REACH = 4
"""Lengths of a window that hybrid students are trained for if nothing is said."""


def reach_of(student: PreTrainedModel, windows: TokenWindows | Images, reach: int | None) -> int | None:
    """How many positions to read the windows at: ``reach``, or by default :data:`REACH` times their length where the
    student is a hybrid language model with rotary positions. None: windows stay where they are, here and below.

    Raises:
        DoflaError: windows cannot be read anywhere among so many positions.
    """
    if reach is not None:
        _check(student, windows, reach)
        return None if reach == windows.length else reach
    hybrid = any(layer.is_hybrid for layer in linear_layers(student).values())
    if not (hybrid and student.can_generate() and _is_rotary(student) and isinstance(windows, TokenWindows)):
        return None
    reach = min(REACH * windows.length, _positions(student) or REACH * windows.length)
    return reach if reach > windows.length else None


def _positions(model: PreTrainedModel) -> int | None:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _is_rotary(model: PreTrainedModel) -> bool:
    return any(name.endswith("rotary_emb") for name, _ in model.named_modules())


def _check(model: PreTrainedModel, windows: TokenWindows | Images, reach: int) -> None:
    if not isinstance(windows, TokenWindows):
        raise DoflaError(f"reach is {reach}: images have no positions to move; leave it out")
    if reach < windows.length:
        raise DoflaError(
            f"reach is {reach}, less than the windows' {windows.length} tokens: give more, or leave it out"
        )
    most = _positions(model)
    if most is not None and reach > most:
        raise DoflaError(f"reach is {reach}: the model has {most} positions")
    # Rotary positions are relative: the teacher does not notice where a window stands. Others are learnt one by one.
    if reach > windows.length and not _is_rotary(model):
        raise DoflaError(f"reach is {reach}: {type(model).__name__} has no rotary positions; leave it out")


def placed(batch: Mapping[str, Tensor], first: int) -> dict[str, Tensor]:
    """The batch, its windows [B, L] beginning at position ``first``."""
    ids = batch["input_ids"]
    positions = torch.arange(first, first + ids.shape[1], device=ids.device)
    return {**batch, "position_ids": positions.expand(len(ids), -1)}


def placed_anywhere(batch: dict[str, Tensor], reach: int | None, generator: torch.Generator) -> dict[str, Tensor]:
    """The batch at a position drawn from those that leave room for it among ``reach``."""
    if reach is None:
        return batch
    room = reach - batch["input_ids"].shape[1]
    return placed(batch, int(torch.randint(room + 1, (), generator=generator)))


def placed_evenly(batch: dict[str, Tensor], reach: int | None, times: int = 4) -> list[dict[str, Tensor]]:
    """The batch at the first, the last, and positions between them."""
    if reach is None:
        return [batch]
    room = reach - batch["input_ids"].shape[1]
    return [placed(batch, room * n // (times - 1)) for n in range(times)]
