"""Checkpoints of dofla as vLLM reads them: the plan is the ``quantization_config``, and weights may be quantized by
torchao."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from dofla.plans.plan import Plan
from dofla.vllm import METHOD


@register_quantization_config(METHOD)
class DoflaConfig(QuantizationConfig):
    """The plan of a compressed model, and what its weights are quantized by, if they are."""

    def __init__(self, plan: Plan, of_weights: QuantizationConfig | None = None) -> None:
        super().__init__()
        self.plan, self.of_weights = plan, of_weights

    @classmethod
    def get_name(cls) -> str:
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> DoflaConfig:
        plan = {name: value for name, value in config.items() if name not in ("quant_method", "record", "weights")}
        weights = config.get("weights")
        of_weights = get_quantization_config(weights["quant_method"]).from_config(weights) if weights else None
        return cls(Plan.from_dict(plan, "quantization_config"), of_weights)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if self.of_weights is not None:
            return self.of_weights.get_quant_method(layer, prefix)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
