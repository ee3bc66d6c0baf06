"""What the operators return, without its contents: how torch.compile traces them. Imported once they are loaded."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.register_fake("dofla::fading")
def _fading(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_weight: Tensor | None,
    state: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    scaling: float,
    heads: list[int],
    behind: bool,
    *sizes: object,
) -> list[Tensor]:
    (batch, all_heads, length, head_dim), kv_heads = query.shape, len(heads) or key.shape[1]
    queries, value_dim = kv_heads * (all_heads // key.shape[1]), value.shape[3]
    like = query.new_empty((), dtype=torch.float32 if behind else value.dtype)
    found = [like.new_empty(batch, length, queries, value_dim).transpose(1, 2), state.new_empty(state.shape)]
    if behind:
        found += [like.new_empty(batch, queries, length), like.new_empty(batch, kv_heads, length, head_dim)]
        found += [like.new_empty(batch, kv_heads, length, value_dim), like.new_empty(batch, length)]
    return found


@torch.library.register_fake("dofla::linear_attention")
def _linear_attention(
    query: Tensor, key: Tensor, value: Tensor, log_weight: Tensor, mean: Tensor, log_mass: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = query.shape[:3]
    after = mean.new_empty(mean.shape), log_mass.new_empty(log_mass.shape)
    return query.new_empty(*rows, value.shape[3]), query.new_empty(rows), *after
