"""Some heads of a tensor, read and written: layers whose heads differ are done group by group."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def query_heads(heads: Sequence[int], groups: int) -> list[int]:
    """The query heads of some KV heads, ``groups`` of each."""
    return [head * groups + n for head in heads for n in range(groups)]


def select(x: Tensor, heads: Sequence[int]) -> Tensor:
    """Some heads of ``x`` [B, H, L, d]; a view if they stand side by side."""
    run = _run(heads)
    return x.index_select(1, on_device(tuple(heads), x.device)) if run is None else x[:, run]


def write(piece: Tensor, out: Tensor, heads: Sequence[int]) -> None:
    """Put ``piece`` into ``out`` [B, H, L, d] as the rows of some heads."""
    if (run := _run(heads)) is not None:
        out[:, run] = piece
        return
    for n, head in enumerate(heads):  # whole rows each, much faster than an index
        out[:, head] = piece[:, n]


def _run(heads: Sequence[int]) -> slice | None:
    """The heads as a slice, if they stand side by side."""
    end = heads[0] + len(heads)
    return slice(heads[0], end) if list(heads) == list(range(heads[0], end)) else None


@lru_cache
def on_device(numbers: tuple[Any, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Whole numbers as a tensor. Once, for the CPU waits for a GPU while it copies something there."""
    with torch.inference_mode(False):  # a later call may need gradients
        return torch.tensor(numbers, dtype=dtype, device=device)


def places(count: int, device: torch.device) -> Tensor:
    """The numbers from 0 on [count], int64: a view of some that are made once."""
    return _places(1 << (count - 1).bit_length(), device)[:count]


@lru_cache
def _places(count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(count, device=device)
