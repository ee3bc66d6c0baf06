"""The gradients of one step, layer by layer: one teacher forward per batch trains all layers at once."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofla.distillation.distributed import share
from dofla.distillation.losses import LOSSES
from dofla.integration.recorder import AttentionCall, recording, run_body
from dofla.layers import AttentionLayer


def layerwise_gradients(
    model: PreTrainedModel,
    layers: Mapping[str, AttentionLayer],
    batches: Sequence[Mapping[str, Tensor]],
    *,
    loss: str,
    rows: int | None,
    generator: Callable[[], torch.Generator],
    own_inputs: bool = False,
) -> dict[str, float]:
    """Add the gradient of each layer's loss, one of :data:`dofla.distillation.LOSSES`, to its feature maps; returns the
    losses, means over the batches of a step in which a batch counts by its windows. Each of several processes adds the
    gradient of its share of every batch, and all return the losses of the whole.

    The model runs as its own teacher, without gradients.

    Args:
        rows: query rows that the loss looks at, drawn by a ``generator`` alike for each layer and batch; None for all.
        own_inputs: the layers answer the queries and keys of the student, behind layers that are linear already, and
            not the teacher's: a second forward per batch, and memory for the teacher's calls of all layers.
    """
    losses = dict.fromkeys(layers, 0.0)
    teacher: dict[str, AttentionCall] = {}
    sizes = [len(next(iter(batch.values()))) for batch in batches]
    parts = 1.0

    def remember(call: AttentionCall) -> None:
        teacher[call.name] = call

    def learn(call: AttentionCall) -> None:
        chosen = call.random_rows(rows or call.query.shape[-2], generator())
        with torch.enable_grad():
            value = LOSSES[loss](teacher.pop(call.name, call), call, layers[call.name], chosen)
            value = value / parts
        if value.requires_grad:  # not if the layer has nothing to train
            value.backward()
        losses[call.name] += value.item()

    with torch.no_grad():
        for size, batch in zip(sizes, batches, strict=True):
            own, parts = share(batch), sum(sizes) / size
            if own_inputs:
                with recording(model, layers, remember):
                    run_body(model, own)
            with recording(model, layers, learn, linear=own_inputs):
                run_body(model, own)
    return losses
