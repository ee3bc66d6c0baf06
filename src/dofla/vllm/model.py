"""Any decoder of transformers with compressed caches, by vLLM's backend for transformers models."""

from __future__ import annotations

from dataclasses import replace

from vllm.model_executor.models.interfaces import HasInnerState, IsAttentionFree
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.model_executor.models.transformers.base import VLLM_ATTN_ATTR
from vllm.model_executor.models.utils import WeightsMapper

from dofla.errors import DoflaError
from dofla.plans.plan import LayerPlan, Plan
from dofla.vllm.checkpoint import DoflaConfig
from dofla.vllm.layer import CompressedAttention


class DoflaForCausalLM(TransformersForCausalLM, HasInnerState, IsAttentionFree):
    """A decoder all of whose attention layers have a compressed cache."""

    def _create_attention_instances(self, prefix: str = "") -> None:
        """One :class:`CompressedAttention` a layer, in the place of vLLM's attention."""
        assert isinstance(self.quant_config, DoflaConfig)
        self._check(self.quant_config.plan)
        layers = {layer.name: layer for layer in self.quant_config.plan.layers}
        prefill = self.quant_config.plan.prefill
        exact = prefill == "exact" or (prefill == "auto" and self.device_config.device.type == "cuda")
        made = []
        for name, fuser in self.attention_fusers.values():
            module = self.get_submodule(name)
            layer = _layer_of(layers, name)
            scaling = fuser.scale(module) or layer.head_dim**-0.5
            heads = self.text_config.num_attention_heads
            own = f"{name}.{VLLM_ATTN_ATTR}"
            context = self.compilation_config.static_forward_context
            made.append(CompressedAttention(layer, heads, scaling, exact, own, context))
            setattr(module, VLLM_ATTN_ATTR, made[-1])
        for attention in made:
            attention.page_bytes = max(one.page_bytes for one in made)
        self.hf_to_vllm_mapper |= WeightsMapper(orig_to_new_substr={".dofla.": f".{VLLM_ATTN_ATTR}."})

    def _check(self, plan: Plan) -> None:
        """Refuse by name what is not supported.

        Raises:
            DoflaError: a layer that stays softmax or has feature maps, or values of another size than keys;
                several GPUs for one model; prefix caching.
        """
        softmax = [layer.name for layer in plan.layers if layer.keep_softmax]
        features = [layer.name for layer in plan.layers if not layer.keep_softmax and layer.feature_map != "none"]
        uneven = [layer.name for layer in plan.layers if layer.head_dim != layer.value_dim]
        if softmax:
            raise DoflaError(f"layer {softmax[0]} stays softmax: vLLM serves models whose layers are all compressed")
        if features:
            raise DoflaError(f"layer {features[0]} has feature maps: vLLM serves compressed caches, of dofla.compress")
        if uneven:
            raise DoflaError(f"layer {uneven[0]} has values of another size than keys, which vLLM cannot serve")
        if self.tp_group.world_size > 1 or self.pp_group.world_size > 1:
            raise DoflaError(
                "a compressed model is on one GPU: leave out --tensor-parallel-size and --pipeline-parallel-size, and "
                "take --data-parallel-size for several"
            )
        if self.cache_config.enable_prefix_caching:
            raise DoflaError("a compressed cache cannot be shared by prefix: leave out --enable-prefix-caching")


def _layer_of(layers: dict[str, LayerPlan], name: str) -> LayerPlan:
    """The plan of a module, which has another prefix here than in the model of transformers; with its name here."""
    found = next((layer for own, layer in layers.items() if name == own or name.endswith(f".{own}")), None)
    if found is None:
        raise DoflaError(f"the plan of the checkpoint has no layer {name!r}: save the model again with this dofla")
    return replace(found, name=name)
