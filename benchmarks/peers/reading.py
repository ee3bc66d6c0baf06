"""A context that is read once for all memories: softmax attention computes what enters the attention of each layer, and
with exact prompts that is the same whatever a cache holds afterwards."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from dofla.integration.cache import state_entry
from dofla.integration.converted import Converted
from dofla.integration.interface import dofla_attention
from dofla.integration.recorder import AttentionCall, evaluation_mode, module_inputs, recording, run_body
from dofla.serving.prompt_state import read_prompt


class Reading:
    """Of a context's tokens [1, L] by an original. Holds the inputs of all layers' attention: of a model of 1.5B and
    4,096 tokens in float32 1.6 GB."""

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        self.ids, self._calls = ids, list[AttentionCall]()
        attention = [name for name, module in model.named_modules() if hasattr(module, "layer_idx")]
        record = recording(model, attention, self._calls.append)
        with torch.inference_mode(), module_inputs(model, attention) as self._hidden, record:
            run_body(model, {"input_ids": ids})

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [1, Hkv, L, d] of each layer."""
        return [(call.key, call.value) for call in self._calls]

    def cache_of(self, student: PreTrainedModel) -> Cache:
        """The cache of a compressed copy of the original that has read the context in one call."""
        if Converted.of(student).plan.prefill != "exact":
            return read_prompt(student, self.ids, chunk=self.tokens)
        cache = DynamicCache(config=student.config)
        with torch.inference_mode(), evaluation_mode(student):
            for call in self._calls:
                module = student.get_submodule(call.name)
                given = {"dofla_entry": state_entry(cache, module), "dofla_hidden": self._hidden[call.name]}
                cache.update(call.key, call.value, module.layer_idx)
                dofla_attention(module, call.query, call.key, call.value, None, scaling=call.scaling, **given)
        return cache


def copied(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with the same weights, in the same memory."""
    return deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
