"""Outputs of the operators without contents, with which torch.compile traces them. Imported once they are loaded."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


@torch.library.register_fake("dofla::attend_and_code")
def _attend_and_code(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_weight: Tensor | None,
    states: list[Tensor],
    keys: list[Tensor],
    values: list[Tensor],
    tables: Tensor,
    scaling: float,
    groups: list[int],
) -> list[Tensor]:
    (batch, heads, length, head_dim), value_dim = query.shape, value.shape[3]
    behind = [kv_heads for kv_heads, features in _groups(groups) if features]
    like = query.new_empty((), dtype=torch.float32 if behind else value.dtype)
    found = [like.new_empty(batch, length, heads, value_dim).transpose(1, 2)]
    found += [state.new_empty(state.shape) for state in states]
    for kv_heads in behind:
        found += [like.new_empty(batch, kv_heads * (heads // key.shape[1]), length)]
        found += [like.new_empty(batch, kv_heads, length, dim) for dim in (head_dim, value_dim)]
        found += [like.new_empty(batch, length)]
    return found


@torch.library.register_fake("dofla::attend_and_code_in_pages")
def _attend_and_code_in_pages(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
    batch, heads, length, _ = query.shape
    return value.new_empty(batch, length, heads, value.shape[3]).transpose(1, 2)


def _groups(numbers: list[int]) -> Iterator[tuple[int, bool]]:
    """KV heads of each group that :attr:`dofla.attention.Layout.sizes` describes, and whether it has features."""
    while numbers:
        heads, *numbers = numbers
        *_, behind, tiers = numbers[heads : heads + 5]
        yield heads, bool(behind)
        numbers = numbers[heads + 5 + tiers :]


@torch.library.register_fake("dofla::linear_attention")
def _linear_attention(
    query: Tensor, key: Tensor, value: Tensor, log_weight: Tensor, mean: Tensor, log_mass: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = query.shape[:3]
    after = mean.new_empty(mean.shape), log_mass.new_empty(log_mass.shape)
    return query.new_empty(*rows, value.shape[3]), query.new_empty(rows), *after
