"""Outputs of the operators without contents, with which torch.compile traces them. Imported once they are loaded."""

import torch
from torch import Tensor


@torch.library.register_fake("dofla::read_compressed")
@torch.library.register_fake("dofla::read_pages")
@torch.library.register_fake("dofla::softmax_attention")
def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
    batch, heads, length, _ = query.shape
    return value.new_empty(batch, length, heads, value.shape[3]).transpose(1, 2)


@torch.library.register_fake("dofla::retain_important")
def _nothing(*rest: object) -> None:
    return None


@torch.library.register_fake("dofla::linear_attention")
def _linear_attention(
    query: Tensor, key: Tensor, value: Tensor, log_weight: Tensor, mean: Tensor, log_mass: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = query.shape[:3]
    after = mean.new_empty(mean.shape), log_mass.new_empty(log_mass.shape)
    return query.new_empty(*rows, value.shape[3]), query.new_empty(rows), *after
