"""Windows at other positions than they have: for students that will read more than the windows they are trained on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofla.data import Images, TokenWindows
from dofla.errors import DoflaError


def check_reach(model: PreTrainedModel, windows: TokenWindows | Images, reach: int | None) -> None:
    """DoflaError unless the windows can be read anywhere among ``reach`` positions of the model. None is always
    possible: windows stay where they are, here and below."""
    if reach is None:
        return
    if not isinstance(windows, TokenWindows):
        raise DoflaError(f"reach is {reach}: images have no positions to move; leave it out")
    if reach < windows.length:
        raise DoflaError(
            f"reach is {reach}, less than the windows' {windows.length} tokens: give more, or leave it out"
        )
    most = getattr(model.config.get_text_config(), "max_position_embeddings", reach)
    if reach > most:
        raise DoflaError(f"reach is {reach}: the model has {most} positions")
    # Rotary positions are relative: the teacher does not notice where a window stands. Others are learnt one by one.
    if not any(name.endswith("rotary_emb") for name, _ in model.named_modules()):
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
