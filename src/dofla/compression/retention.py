"""Trying another rule of eviction in a compressed model, without writing a kernel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dofla.attention.heads import query_heads
from dofla.attention.naive_cache import NaiveCache, Retention
from dofla.errors import DoflaError
from dofla.integration.converted import Converted
from dofla.integration.interface import softmax_attention, standard_scaling, visiting


@contextmanager
def retention(model: PreTrainedModel, rule: Callable[[], Retention]) -> Iterator[PreTrainedModel]:
    """Within the block a compressed model evicts by another rule, computed by :mod:`dofla.attention.naive_cache`:
    seconds for a window of some hundred tokens. For text in one call, without a cache and without padding.

        class Random:
            def decay(self, score):
                return score

            def score(self, weights):
                return torch.rand(weights.shape[0], weights.shape[2])

        with retention(model, Random):
            print(dofla.evaluate(model, windows))

    Args:
        model: compressed.
        rule: makes the rule of a group of heads.

    Raises:
        DoflaError: the model is not compressed; padding.
    """
    layers = {model.get_submodule(name): layer for name, layer in Converted.of(model).layers.items()}

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        layer = layers.get(module)
        heads = None if layer is None else layer.compressed
        if layer is None or heads is None:
            return softmax_attention(module, query, key, value, mask, **kwargs)[0], None
        if mask is not None:
            raise DoflaError("another rule of eviction is tried on text without padding: leave the attention mask out")
        query, scaling = standard_scaling(module, query, kwargs.get("scaling"))
        query, key = layer.smooth(query, key)
        out = value.new_empty(*query.shape[:-1], value.shape[-1])
        share = query.shape[1] // key.shape[1]
        for size, own, tier in zip(heads.layout.sizes, heads.layout.heads, heads.tiers, strict=True):
            cache, queries = NaiveCache(size, tier, scaling, rule()), query_heads(own, share)
            asked = query[:, queries].unflatten(1, (len(own), share)).flatten(0, 1)  # [R, G, L, d]
            keys, values = (x[:, own].flatten(0, 1) for x in (key, value))
            found = [cache.step(asked[:, :, i], keys[:, i], values[:, i]) for i in range(key.shape[2])]
            out[:, queries] = torch.stack(found, 2).unflatten(0, (-1, len(own))).flatten(1, 2).to(out.dtype)
        return out.transpose(1, 2).contiguous(), None

    with torch.no_grad(), visiting(model, None, attention):
        yield model
