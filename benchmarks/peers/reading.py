"""A context that is read once for all memories: softmax attention computes what enters the attention of each layer, and
with exact prompts that is the same whatever a cache holds afterwards."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from dofla.integration.cache import state_entry
from dofla.integration.converted import Converted
from dofla.integration.interface import dofla_attention, visiting
from dofla.integration.recorder import evaluation_mode
from dofla.layers.predictor import input_of
from dofla.serving.prompt_state import read_prompt


class Reading:
    """Of a context's tokens [1, L] by an original. Holds the inputs of all layers' attention: of a model of 1.5B and
    4,096 tokens in float32 1.6 GB."""

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        self.ids, self._hidden, self._calls = ids, {}, {}
        names = {module: name for name, module in model.named_modules()}

        def visit(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, _) -> None:
            self._calls[names[module]] = query, key, value, mask, 0.0, scaling

        def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
            self._hidden[names[module]] = input_of(args, kwargs)

        attention = [module for module in model.modules() if hasattr(module, "layer_idx")]
        hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in attention]
        with torch.inference_mode(), visiting(model, visit):
            model.base_model(ids, use_cache=False)
        for hook in hooks:
            hook.remove()

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [1, Hkv, L, d] of each layer."""
        return [call[1:3] for call in self._calls.values()]

    def cache_of(self, student: PreTrainedModel) -> Cache:
        """The cache of a compressed copy of the original that has read the context in one call."""
        if Converted.of(student).plan.prefill != "exact":
            return read_prompt(student, self.ids, chunk=self.tokens)
        cache = DynamicCache(config=student.config)
        with torch.inference_mode(), evaluation_mode(student):
            for name, call in self._calls.items():
                module = student.get_submodule(name)
                entry = state_entry(cache, module)
                cache.update(*call[1:3], module.layer_idx)
                dofla_attention(module, *call, dofla_entry=entry, dofla_hidden=self._hidden[name])
        return cache


def copied(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with the same weights, in the same memory."""
    return deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
