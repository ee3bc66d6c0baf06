"""Which weights of a model train, and how it is left afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, set_seed

from dofla.integration.attaching import AttachedLinearAttention
from dofla.integration.lora import add_factors, lora_factors, low_rank


@contextmanager
def training_weights(
    model: PreTrainedModel, lora_rank: int | None, train_feature_maps: bool
) -> Iterator[dict[str, torch.nn.Parameter]]:
    """Within the block only the weights it is given, by name, have ``requires_grad``, and all of them are float32.

    Without ``lora_rank`` these are all weights: AdamW's small steps would be lost in the 8 bits of bfloat16. With it
    they are low-rank factors beside every linear layer but the output layer; they are merged into the weights when
    the block ends, and taken off again if it fails. Either way all of the model is
    float32 in the end, and in evaluation mode.
    """
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    config = vars(model.config).copy()
    try:
        if lora_rank is None:
            model.float().requires_grad_(True)
            _set_feature_maps(model, train_feature_maps)
            yield trained(model)
        else:
            # peft freezes all that was there, feature maps included.
            with low_rank(model, lora_rank):
                _set_feature_maps(model, train_feature_maps)
                yield trained(model)
                factors = lora_factors(model)
            model.float()  # in bfloat16 most of the update would be rounded away
            add_factors(model, factors)
    finally:
        model.eval()
        model.config.__dict__ = config  # Trainer has turned caches off in it
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(before[name])
            parameter.grad = None


def trained(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """The weights that get gradients, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def in_memory(weights: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """Copies in CPU memory."""
    return {name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()}


def write_back(values: dict[str, Tensor], weights: dict[str, torch.nn.Parameter]) -> None:
    """The reverse of :func:`in_memory`."""
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(values[name])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within the block all global generators start at ``seed``; afterwards they are as they were."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - Trainer seeds it
    try:
        with torch.random.fork_rng():
            set_seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def _set_feature_maps(model: PreTrainedModel, train: bool) -> None:
    for module in model.modules():
        if isinstance(module, AttachedLinearAttention):
            module.requires_grad_(train)
