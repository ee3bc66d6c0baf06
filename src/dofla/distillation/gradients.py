"""The gradients of one step: layer by layer, where one teacher forward per batch trains all layers at once; or end to
end, of the next-token loss of the linearized model (the paper's ``direct``)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofla.distillation.distributed import gather, share
from dofla.distillation.losses import LOSSES
from dofla.errors import DoflaError
from dofla.integration.recorder import AttentionCall, recording, run_body
from dofla.layers import AttentionLayer

DIRECT = "direct"
_IGNORED = -100  # the label that transformers' losses leave out


def layerwise_gradients(
    model: PreTrainedModel,
    layers: Mapping[str, AttentionLayer],
    batches: Sequence[Mapping[str, Tensor]],
    *,
    loss: str,
    rows: int | None,
    generator: Callable[[], torch.Generator],
) -> dict[str, float]:
    """Add the gradient of each layer's loss, one of :data:`dofla.distillation.LOSSES`, to its feature maps; returns the
    losses, means over the batches of a step in which a batch counts by its windows. Each of several processes adds the
    gradient of its share of every batch, and all return the losses of the whole.

    The model runs as its own teacher, without gradients.

    Args:
        rows: query rows that the loss looks at, drawn by a ``generator`` alike for each layer and batch; None for all.
    """
    losses = dict.fromkeys(layers, 0.0)
    sizes = [len(next(iter(batch.values()))) for batch in batches]
    parts = 1.0

    def learn(call: AttentionCall) -> None:
        chosen = call.random_rows(rows or call.query.shape[-2], generator())
        with torch.enable_grad():
            value = LOSSES[loss](call, layers[call.name], chosen) / parts
        if value.requires_grad:  # not if the layer has nothing to train
            value.backward()
        losses[call.name] += value.item()

    with torch.no_grad():
        for size, batch in zip(sizes, batches, strict=True):
            parts = sum(sizes) / size
            with recording(model, layers, learn):
                run_body(model, share(batch))
    return losses


def next_token_gradients(
    model: PreTrainedModel, layers: Mapping[str, AttentionLayer], batches: Sequence[Mapping[str, Tensor]]
) -> dict[str, float]:
    """Add the gradient of the next-token loss to the feature maps of ``layers``; returns the loss, a mean over the
    batches of a step in which a batch counts by its windows. Each of several processes adds that of its share of every
    batch.

    The graph goes through the whole linearized model, but only the feature maps are given gradients. Padding is not
    predicted. DoflaError if the model predicts no next token.
    """
    if not model.can_generate():
        raise DoflaError(f"loss 'direct': {type(model).__name__} predicts no next token; train it with softmax or l2")
    total, sizes = 0.0, [len(batch["input_ids"]) for batch in batches]
    with _only_these_train(model, layers):
        for size, batch in zip(sizes, batches, strict=True):
            own = {k: v.to(model.device) for k, v in share(batch).items()}
            labels = own["input_ids"]
            if "attention_mask" in own:
                labels = labels.masked_fill(own["attention_mask"] == 0, _IGNORED)
            asked = (labels[:, 1:] != _IGNORED).sum()
            loss = model(**own, labels=labels, use_cache=False).loss
            value = gather(loss * asked).sum(0) / gather(asked).sum(0) / (sum(sizes) / size)
            value.backward()
            total += value.item()
    return {DIRECT: total}


@contextmanager
def _only_these_train(model: PreTrainedModel, layers: Mapping[str, AttentionLayer]) -> Iterator[None]:
    """Within the block no other weight takes part in the graph."""
    ours = {id(p) for layer in layers.values() for p in layer.parameters()}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in ours]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
