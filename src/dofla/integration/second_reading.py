"""A second reading of a text tells which tokens are needed later (KVzip, Kim et al. 2025, arXiv 2505.23416): a text
stands there twice in a row, and a token counts in a KV head by the most attention that a query of the second time pays
to it."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dofla.attention import LOG_ZERO, exact_scores
from dofla.errors import DoflaError
from dofla.integration.cache import cache_of, state_entry
from dofla.integration.instead import computed_instead
from dofla.integration.interface import one_by_one
from dofla.integration.offload import device_of
from dofla.integration.positions import positions_of
from dofla.integration.reading import keeps_states
from dofla.integration.recorder import AttentionCall, recording, run_body

logger = logging.getLogger(__name__)

_ROWS = 32
"""Queries at a time: their attention stays in a processor's cache."""


@dataclass
class SecondReading:
    """A visitor of attention calls on a text that stands there twice, one sequence without padding."""

    attention: dict[str, Tensor] = field(default_factory=dict)  # most attention to tokens of the first time [Hkv, n]

    def __call__(self, call: AttentionCall) -> None:
        """Add what a layer attends to."""
        heads, length = call.key.shape[1:3]
        most = torch.full((heads, length // 2), LOG_ZERO, device=call.key.device)
        for start in range(length // 2, length, _ROWS):
            query = call.query[:, :, start : start + _ROWS]
            rows = query.shape[2]
            scores = exact_scores(query, call.key[:, :, : start + rows], call.scaling)  # [1, H, R, <= L]
            later = torch.ones(rows, rows, dtype=torch.bool, device=scores.device).triu(1)
            scores[..., start:].masked_fill_(later, LOG_ZERO)
            normalizer = scores.logsumexp(-1, keepdim=True)
            shares = scores[..., : length // 2].sub_(normalizer).unflatten(1, (heads, -1))
            most = torch.maximum(most, shares.amax((0, 2, 3)))
        self.attention[call.name] = most.exp()


def check_reads_twice(model: PreTrainedModel) -> None:
    """DoflaError unless a prompt of the model is text alone, which its body reads in one call."""
    if not keeps_states(model) or model.config.get_text_config() is not model.config:
        name = type(model).__name__
        raise DoflaError(
            f"prefill is 'twice': {name} reads more than a text, or has a cache of its own kind: choose 'exact'"
        )


def read_again(model: PreTrainedModel, body: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a converted model's body: before a prompt enters an empty cache, read it twice in a row by
    softmax attention, and leave at each entry how important the tokens are (:attr:`dofla.attention.Call.importance`).

    A prompt that stands in embeddings, under a mask that tells more than padding, or twice past the positions, is read
    once.
    """
    ids = kwargs.get("input_ids", args[0] if args else None)
    if ids is None or ids.shape[1] == 1 or one_by_one() or computed_instead(model.config):
        return
    given = signature(body.forward).bind_partial(*args, **kwargs).arguments
    cache, mask = cache_of(args, kwargs), given.get("attention_mask")
    if cache is None or int(cache.get_seq_length()) > 0:
        return
    most, plain = positions_of(model), mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)
    if not plain or (most is not None and 2 * ids.shape[1] > most):
        logger.warning("a prompt of %d tokens is read once: twice it has no place in the model", ids.shape[1])
        return
    modules: dict[str, Any] = {name: x for name, x in model.named_modules() if "dofla" in x._modules}
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask[:, : ids.shape[1]].bool()
    texts = [tuple(row[own].tolist()) for row, own in zip(ids, real, strict=True)]
    read = {text: _read_twice(model, modules, text) for text in {*texts} if text}  # beams begin with one text
    for name, module in modules.items():
        device = device_of(module)
        importance = torch.zeros(len(ids), module.dofla.kv_heads, ids.shape[1], device=device)
        for row, text, own in zip(importance, texts, real.to(device), strict=True):
            if text:
                row[:, own] = read[text][name].square().to(row)
        state_entry(cache, module).importance = importance


@torch.no_grad()
def _read_twice(model: PreTrainedModel, names: Collection[str], text: Sequence[int]) -> dict[str, Tensor]:
    """The most attention to tokens [Hkv, n] on a second reading, by layer."""
    reading = SecondReading()
    with recording(model, names, reading):
        run_body(model, {"input_ids": torch.tensor([[*text, *text]])})
    return reading.attention
