"""The gradients of one step, end to end: the next-token loss of the linearized model (the paper's ``direct``)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor
from transformers import PreTrainedModel

from dofla.distillation.distributed import gather, share
from dofla.errors import DoflaError
from dofla.layers import AttentionLayer

DIRECT = "direct"
_IGNORED = -100
"""The label that transformers' losses leave out."""


def next_token_gradients(
    model: PreTrainedModel, layers: Mapping[str, AttentionLayer], batches: Sequence[Mapping[str, Tensor]]
) -> dict[str, float]:
    """Add the gradient of the next-token loss to the feature maps of ``layers``; returns the loss, a mean over the
    batches of a step in which a batch counts by its windows. Each of several processes adds that of its share of every
    batch.

    The graph goes through the whole linearized model, but only the feature maps are given gradients. Padding is not
    predicted. DoflaError if the model predicts no next token."""
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
