"""Low-rank updates of linear layers: put on by peft, taken off as factors, merged in float32."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dofla.integration.trained import keep_original
from dofla.storage.extras import extra

_A, _B = ".lora_A", ".lora_B"
_ADAPTER = "default"  # peft's name for it


@contextmanager
def low_rank(model: PreTrainedModel, rank: int) -> Iterator[Any]:
    """Within the block every linear layer but the output layer has low-rank factors beside it, which alone train.

    They are float32, whatever the model is, and drawn from the global generator; their product begins at zero and
    counts twice. When the block ends they are taken off: read them before, by :func:`lora_factors`. Yields peft's
    wrapper, whose layers stand inside ``model`` itself, which is used as before. DoflaError if peft is not installed.
    """
    peft = extra("peft")
    transposed = any(isinstance(module, Conv1D) for module in model.modules())
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", fan_in_fan_out=transposed)
    wrapper = peft.get_peft_model(model, config)
    try:
        yield wrapper
    finally:
        wrapper.unload()


def lora_factors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Within :func:`low_rank`: ``<layer>.lora_A`` [r, inputs] and ``<layer>.lora_B`` [outputs, r], float32 on the CPU,
    such that B @ A is what the layer's weight gains."""
    layer_class, factors = extra("peft.tuners.lora").LoraLayer, {}
    for name, module in model.named_modules():
        if isinstance(module, layer_class):
            scaled = module.lora_B[_ADAPTER].weight * module.scaling[_ADAPTER]
            for key, factor in ((_A, module.lora_A[_ADAPTER].weight), (_B, scaled)):
                factors[name + key] = factor.detach().to("cpu", torch.float32, copy=True).contiguous()
    return factors


@torch.no_grad()
def add_factors(model: PreTrainedModel, factors: Mapping[str, Tensor]) -> None:
    """Add each B @ A to the weight of its layer: the sum in float32, then rounded to the weight's dtype."""
    for name in factor_pairs(factors):
        layer = model.get_submodule(name)
        weight = layer.get_parameter("weight")
        update = factors[name + _B].to(weight.device) @ factors[name + _A].to(weight.device)
        weight.copy_(weight + (update.T if isinstance(layer, Conv1D) else update))


def merge_factors(model: PreTrainedModel, factors: Mapping[str, Tensor]) -> None:
    """Add low-rank factors to a student's weights (:func:`add_factors`), and keep the original weights, those of its
    teacher, beside the new."""
    keep_original(model, [f"{name}.weight" for name in factor_pairs(factors)], factors)
    add_factors(model, factors)


def factor_pairs(factors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """A and B of each layer, None where there is none."""
    names = dict.fromkeys(name.removesuffix(_A).removesuffix(_B) for name in factors)
    return {name: (factors.get(name + _A), factors.get(name + _B)) for name in names}
