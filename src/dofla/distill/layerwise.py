"""The gradients of one step, layer by layer: one teacher forward per batch trains all layers at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofla.distill.losses import LOSSES
from dofla.integration.recorder import AttentionCall, recording, run_body
from dofla.integration.surgery import linear_layers


def layerwise_gradients(
    student: PreTrainedModel,
    batches: Sequence[Mapping[str, Tensor]],
    *,
    loss: str,
    rows: int | None,
    generator: Callable[[], torch.Generator],
    own_inputs: bool = False,
) -> dict[str, float]:
    """Add the gradient of each layer's loss to its feature maps; returns the losses, means over ``batches``.

    Args:
        student: a linearised model; it runs as its own teacher, without gradients.
        batches: of one step.
        loss: a name in :data:`dofla.distill.LOSSES`.
        rows: query rows that the loss looks at; None for all.
        generator: of the rows; the same for each layer and batch.
        own_inputs: the layers answer the queries and keys of the student, behind layers that are linear already, and
            not the teacher's: a second forward per batch, and memory for the teacher's calls of all layers.
    """
    layers = linear_layers(student)
    losses = dict.fromkeys(layers, 0.0)
    teacher: dict[str, AttentionCall] = {}

    def remember(call: AttentionCall) -> None:
        teacher[call.name] = call

    def learn(call: AttentionCall) -> None:
        chosen = call.random_rows(rows or call.query.shape[-2], generator())
        with torch.enable_grad():
            value = LOSSES[loss](teacher.pop(call.name, call), call, layers[call.name], chosen) / len(batches)
        value.backward()
        losses[call.name] += value.item()

    with torch.no_grad():
        for batch in batches:
            if own_inputs:
                with recording(student, layers, remember):
                    run_body(student, batch)
            with recording(student, layers, learn, linear=own_inputs):
                run_body(student, batch)
    return losses
