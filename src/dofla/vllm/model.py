"""Any decoder of transformers with compressed caches, by vLLM's backend for transformers models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFunc, get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsAttentionFree, IsHybrid, SupportsMambaPrefixCaching
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.model_executor.models.transformers.base import VLLM_ATTN_ATTR
from vllm.model_executor.models.utils import WeightsMapper
from vllm.sequence import IntermediateTensors

from dofla.display import size
from dofla.errors import DoflaError
from dofla.plans.layers import CompressedLayer
from dofla.plans.plan import Plan
from dofla.vllm.checkpoint import DoflaConfig
from dofla.vllm.layer import CompressedAttention, page_bytes

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


def with_large_frame(function: Callable[P, R]) -> Callable[P, R]:
    """A function with a frame of 128 KiB, so that the frames of all that it calls lie in one chunk of memory.

    CPython keeps frames in chunks of 16 KiB. A call that needs the next chunk maps it, and unmaps it when it returns,
    which takes 20 µs. Where layers happen to be at such a depth, each small function that they call pays that: a
    quarter of the time of a decoded token. The large frame gets a chunk twice its size, most of which nobody writes.
    """
    function.__code__ = function.__code__.replace(co_stacksize=2**14)
    return function


class _Compressed(TransformersForCausalLM, HasInnerState, SupportsMambaPrefixCaching):
    """A decoder whose attention layers have a compressed cache, or are those of vLLM."""

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, ...]:
        """A state is copied whole."""
        return (get_temporal_copy_spec,)

    def _create_attention_instances(self, prefix: str = "") -> None:
        """vLLM's attention for each layer, and a :class:`CompressedAttention` in the place of those in the plan."""
        assert isinstance(self.quant_config, DoflaConfig)
        plan = self.quant_config.plan
        self._check(plan)
        super()._create_attention_instances(prefix)
        if plan.prefill == "twice":
            logger.warning("prefill is twice: vLLM gives prompts in pieces, which are read once, exactly")
        compressed, made, length = plan.compressed, [], self.model_config.max_model_len
        rank, ranks = self.tp_group.rank_in_group, self.tp_group.world_size
        if plan.growing:
            logger.warning(
                "%d KV heads hold every token: the cache of a request has room for %d tokens (--max-model-len) and "
                "takes %s; with fewer, more requests fit",
                *(plan.growing, length, size(sum(page_bytes(layer, length, ranks) for layer in compressed))),
            )
        for name, fuser in self.attention_fusers.values():
            if (layer := _layer_of(compressed, name)) is None:
                continue
            module, own = self.get_submodule(name), f"{name}.{VLLM_ATTN_ATTR}"
            context = self.compilation_config.static_forward_context
            del context[getattr(module, VLLM_ATTN_ATTR).layer_name]
            scaling = fuser.scale(module) or layer.head_dim**-0.5
            heads = self.text_config.num_attention_heads // ranks
            exact = plan.prefill != "sequential"
            made.append(CompressedAttention(layer, rank, ranks, heads, scaling, exact, own, length, context))
            setattr(module, VLLM_ATTN_ATTR, made[-1])
            if made[-1].predicts:
                module.register_forward_pre_hook(made[-1].take_input, with_kwargs=True)
        if len(made) < len(compressed) and self.pp_group.world_size == 1:
            raise DoflaError(
                f"the plan of the checkpoint has {len(compressed)} compressed layers, the model {len(made)} of them: "
                "save the model again with this dofla"
            )
        self.hf_to_vllm_mapper |= WeightsMapper(orig_to_new_substr={".dofla.": f".{VLLM_ATTN_ATTR}."})

    @with_large_frame
    def forward(self, *args: Any, **options: Any) -> Tensor | IntermediateTensors:
        return super().forward(*args, **options)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """See vLLM, which has no product with an output layer in int8: it gets the numbers that the integers stand
        for."""
        return super().load_weights(
            (name, weight.dequantize() if name.endswith("lm_head.weight") and hasattr(weight, "qdata") else weight)
            for name, weight in weights
        )

    def _check(self, plan: Plan) -> None:
        """Refuse by name what is not supported.

        Raises:
            DoflaError: a layer that has feature maps, or values of another size than keys.
        """
        uneven = [layer.name for layer in plan.compressed if layer.head_dim != layer.value_dim]
        if plan.linear:
            raise DoflaError(
                f"layer {plan.linear[0].name} has feature maps: vLLM serves compressed caches, of dofla.compress"
            )
        if uneven:
            raise DoflaError(f"layer {uneven[0]} has values of another size than keys, which vLLM cannot serve")


class DoflaForCausalLM(_Compressed, IsAttentionFree):
    """A decoder all of whose attention layers have a compressed cache."""


class DoflaHybridForCausalLM(_Compressed, IsHybrid):
    """A decoder whose attention layers have compressed caches, but for some: softmax, or with a sliding window."""

    def _create_attention_instances(self, prefix: str = "") -> None:
        super()._create_attention_instances(prefix)
        if self.device_config.device.type == "cpu":
            from dofla.vllm.cpu import clear_blocks_of_sliding_layers

            clear_blocks_of_sliding_layers()

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """The largest state of a layer in any process, after which vLLM sizes the pages of all."""
        assert isinstance(vllm_config.quant_config, DoflaConfig)
        length, ranks = vllm_config.model_config.max_model_len, vllm_config.parallel_config.tensor_parallel_size
        layers = vllm_config.quant_config.plan.compressed
        return ((max(page_bytes(layer, length, ranks) for layer in layers),),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """Bytes."""
        return (torch.uint8,)


def _layer_of(layers: list[CompressedLayer], name: str) -> CompressedLayer | None:
    """The plan of a module, which has another prefix here than in the model of transformers; with its name here."""
    found = next((layer for layer in layers if name == layer.name or name.endswith(f".{layer.name}")), None)
    return None if found is None else replace(found, name=name)
