"""One optimiser step of fine-tuning."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from dofla.errors import DoflaError
from dofla.tasks.encode import Row
from dofla.tasks.finetune.examples import IGNORED, asked_of, padded

_WARM_UP = 0.06
"""The part of all steps in which the rate rises."""


class Learner:
    """AdamW without weight decay on ``weights``, its rate rising shortly and then falling linearly to 0.

    Args:
        model: on the accelerator's device.
        weights: those of its parameters that train.
        accelerator: of accelerate.
        learning_rate: at its peak.
        steps: there will be.
        autocast: the context of forward passes.
        forward_batch: rows per forward pass.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        weights: Sequence[nn.Parameter],
        accelerator: Any,
        *,
        learning_rate: float,
        steps: int,
        autocast: torch.autocast,
        forward_batch: int,
    ) -> None:
        self.model, self.weights, self.accelerator = model, list(weights), accelerator
        self.steps, self.autocast, self.forward_batch = steps, autocast, forward_batch
        optimizer = torch.optim.AdamW(self.weights, lr=learning_rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, steps))
        self.optimizer, self.schedule = accelerator.prepare(optimizer, schedule)
        self.done = 0

    def step(self, rows: Sequence[Row]) -> float:
        """Learn some answers; returns their loss before, in nats per answer token."""
        asked, loss = asked_of(rows), 0.0
        for start in range(0, len(rows), self.forward_batch):
            batch = padded(rows[start : start + self.forward_batch])
            with self.autocast:
                part = answer_loss(self.model, {k: v.to(self.accelerator.device) for k, v in batch.items()}) / asked
            self.accelerator.backward(part)
            loss += part.item()
        if not math.isfinite(loss):
            raise DoflaError(f"the loss is {loss} at step {self.done + 1} of {self.steps}: lower learning_rate")
        self.accelerator.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.done += 1
        return loss


def rate_at(step: int, steps: int) -> float:
    """The rate of step 0, 1, ... ``steps`` - 1 over its peak; never 0, as such a step would be for nothing."""
    rising = math.ceil(_WARM_UP * steps)
    return min((step + 1) / rising, (steps - step) / (steps - rising + 1))


def answer_loss(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Negative log-likelihood of the targets, in nats, summed over them.

    Args:
        batch: as :func:`dofla.tasks.finetune.examples.padded` makes it.
    """
    targets = batch["targets"]
    # Most places are context. Their logits, a vocabulary wide each, would cost as much as several layers. The places
    # are listed, as a slice of the hidden states would not be contiguous, and the product a hundred times slower.
    places = (targets != IGNORED).any(0).nonzero()[:, 0]
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        logits = model(**inputs, logits_to_keep=places).logits
    else:
        logits = model(**inputs).logits[:, places]
    targets = targets[:, places]
    asked = targets != IGNORED
    return F.cross_entropy(logits[asked].float(), targets[asked], reduction="sum")
