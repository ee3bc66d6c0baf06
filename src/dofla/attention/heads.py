"""Some heads of a tensor, read and written: layers whose heads differ are done group by group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def query_heads(heads: Sequence[int], groups: int) -> list[int]:
    """The query heads of some KV heads, ``groups`` of each."""
    return [head * groups + n for head in heads for n in range(groups)]


def select(x: Tensor, heads: Sequence[int]) -> Tensor:
    """Some heads of ``x`` [B, H, L, d]; a view if they stand side by side."""
    return x[:, _run(heads)] if _is_run(heads) else x.index_select(1, _index(tuple(heads), x.device))


def write(piece: Tensor, out: Tensor, heads: Sequence[int]) -> None:
    """Put ``piece`` into ``out`` [B, H, L, d] as the rows of some heads."""
    if _is_run(heads):
        out[:, _run(heads)] = piece
        return
    for n, head in enumerate(heads):  # whole rows each, much faster than an index
        out[:, head] = piece[:, n]


def _is_run(heads: Sequence[int]) -> bool:
    """True if heads stand side by side."""
    return list(heads) == list(range(heads[0], heads[0] + len(heads)))


def _run(heads: Sequence[int]) -> slice:
    return slice(heads[0], heads[0] + len(heads))


@lru_cache
def _index(heads: tuple[int, ...], device: torch.device) -> Tensor:
    """Once, for the CPU waits for a GPU while it copies something there."""
    return torch.tensor(heads, device=device)
