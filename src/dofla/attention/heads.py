"""Some heads of a tensor, read and written: layers whose heads differ are done group by group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def query_heads(heads: Sequence[int] | None, groups: int) -> list[int] | None:
    """The query heads of some KV heads, ``groups`` of each; None stands for all heads."""
    return None if heads is None else [head * groups + n for head in heads for n in range(groups)]


def select(x: Tensor, heads: Sequence[int] | None, part: slice = slice(None)) -> Tensor:
    """Some heads and tokens of ``x`` [B, H, L, d]; a view if the heads stand side by side."""
    x = x[:, :, part]
    if heads is None:
        return x
    if list(heads) == list(range(heads[0], heads[0] + len(heads))):
        return x[:, heads[0] : heads[0] + len(heads)]
    return x.index_select(1, torch.tensor(heads, device=x.device))


def write(piece: Tensor, out: Tensor | None, heads: Sequence[int] | None, part: slice = slice(None)) -> Tensor:
    """``out`` [B, H, L, d] with ``piece`` as its rows of some heads and tokens; without ``out``, ``piece`` itself."""
    if out is None:
        return piece
    if heads is None:
        out[:, :, part] = piece
    else:
        for n, head in enumerate(heads):  # whole rows each, much faster than an index
            out[:, head, part] = piece[:, n]
    return out
