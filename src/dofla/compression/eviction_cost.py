"""The cost of eviction and quantization in each KV head: first-order change of the KL to the original.

While a compressed model reads a window, each layer also computes what softmax attention would have answered; and the
gradient of the model's loss at the layer's output says what the difference costs there:
⟨∂ KL(original ‖ compressed) / ∂ out, out_softmax − out⟩, to first order, head by head. So the cost is that in a model
whose other heads evict as well, which matters: where one head alone evicts what is far back, others make up for it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dofla.distillation.objective import Objective
from dofla.integration.converted import Converted
from dofla.integration.interface import softmax_attention, visiting
from dofla.integration.recorder import AttentionCall, evaluation_mode
from dofla.integration.surgery import original


def eviction_costs(
    compressed: Converted,
    batches: Sequence[Mapping[str, Tensor]],
    report: Callable[[], None],
    last: int | None = None,
) -> dict[str, Tensor]:
    """The cost of eviction in each KV head [Hkv], float64, by layer: the mean loss minus the loss, to first order, if
    that head alone answered as softmax attention does. Of each window the ``last`` tokens count, default all;
    ``report`` is called after each batch."""
    layers, model = compressed.layers, compressed.model
    costs = {name: torch.zeros(layer.kv_heads, dtype=torch.float64) for name, layer in layers.items()}
    with _frozen(model), evaluation_mode(model), torch.enable_grad():
        loss = Objective(model, partial(original, model), last)
        tokens, rows = sum(map(loss.count, batches)), sum(len(batch["input_ids"]) for batch in batches)
        for batch in batches:
            with _answers(compressed) as seen:
                value = loss({name: data.to(model.device) for name, data in batch.items()}, tokens, rows)
            gradients = torch.autograd.grad(value, [out for out, _ in seen.values()])
            for (name, (_, difference)), gradient in zip(seen.items(), gradients, strict=True):
                by_head = -(gradient.double() * difference).sum((0, 1, 3)).cpu()
                costs[name] += by_head.unflatten(0, (layers[name].kv_heads, -1)).sum(1)
            report()
    return costs


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Within the block no parameter gets gradients."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def _answers(compressed: Converted) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Within the block the model answers with its compressed cache, and gradients pass as through softmax attention.
    Yields, by layer, its output [B, L, H, dv] in the last call, and what that of softmax attention is more than
    that."""
    by_module = {compressed.model.get_submodule(name): name for name in compressed.layers}
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def attention(module: nn.Module, *inputs: Any, **kwargs: Any) -> tuple[Tensor, None]:
        smooth, _ = softmax_attention(module, *inputs, **kwargs)
        if module not in by_module:
            return smooth, None
        query, key, value, mask, _, scaling = inputs
        call = AttentionCall.of(by_module[module], module, query, key, value, mask, scaling, kwargs)
        with torch.no_grad():
            own = call.run(compressed.layers[call.name])
            own = own.transpose(1, 2).contiguous()  # as transformers' own attention functions return it
        out = own + (smooth - smooth.detach())
        out = out if out.requires_grad else out.requires_grad_()  # nothing before the first layer trains
        seen[call.name] = out, smooth.detach() - own
        return out, None

    with visiting(compressed.model, None, attention):
        yield seen
