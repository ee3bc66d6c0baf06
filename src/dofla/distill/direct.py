"""The gradients of one step, end to end: the next-token loss of the linearised model (the paper's ``direct``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor
from transformers import PreTrainedModel

from dofla.errors import DoflaError
from dofla.integration.surgery import linear_layers

DIRECT = "direct"


def next_token_gradients(
    student: PreTrainedModel,
    batches: Sequence[Mapping[str, Tensor]],
) -> dict[str, float]:
    """Add the gradient of the next-token loss to all feature maps; returns the loss, a mean over ``batches``.

    The graph goes through the whole linearised model, but only the feature maps are given gradients.

    Args:
        student: a linearised causal language model.
        batches: of one step; padding is not predicted.

    Raises:
        DoflaError: the model predicts no next token.
    """
    if not student.can_generate():
        raise DoflaError(f"loss 'direct': {type(student).__name__} predicts no next token; train it with softmax or l2")
    total = 0.0
    with _only_feature_maps_train(student):
        for batch in batches:
            batch = {k: v.to(student.device) for k, v in batch.items()}
            labels = batch["input_ids"]
            if "attention_mask" in batch:
                labels = labels.masked_fill(batch["attention_mask"] == 0, -100)
            value = student(**batch, labels=labels, use_cache=False).loss / len(batches)
            value.backward()
            total += value.item()
    return {DIRECT: total}


@contextmanager
def _only_feature_maps_train(student: PreTrainedModel) -> Iterator[None]:
    """Within the block no other weight takes part in the graph."""
    ours = {id(p) for layer in linear_layers(student).values() for p in layer.parameters()}
    others = [p for p in student.parameters() if p.requires_grad and id(p) not in ours]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
