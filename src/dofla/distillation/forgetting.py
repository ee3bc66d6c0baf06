"""The cost of forgetting to a model, for each KV head.

While a student reads a window, each layer also computes what softmax attention would have answered; and the gradient of
the student's loss at the layer's output says what forgetting costs there:
⟨∂ KL(teacher ‖ student) / ∂ out, out_softmax − out⟩, to first order, head by head. So the cost is that on a model whose
other heads forget as well, which matters: where one head alone forgets what is far back, others make up for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dofla.distillation.objective import Objective
from dofla.distillation.trainable import trainable
from dofla.integration.interface import softmax_attention, visiting
from dofla.integration.recorder import AttentionCall, evaluation_mode
from dofla.integration.student import Student


def costs_of_heads(
    student: Student,
    parts: Sequence[Mapping[str, Tensor]],
    report: Callable[[], None],
    last: int | None = None,
) -> dict[str, Tensor]:
    """The cost of forgetting in each KV head [Hkv], float64, by layer: the mean loss minus the loss, to first order, if
    that head alone answered as softmax attention does.

    Args:
        student: a causal language model.
        parts: batches.
        report: called after each of them.
        last: tokens at the end of each window that count; default all.
    """
    layers, model = student.layers, student.model
    costs = {name: torch.zeros(len(layer.features), dtype=torch.float64) for name, layer in layers.items()}
    with trainable(student, "maps", 0) as part, evaluation_mode(model), torch.enable_grad():
        loss = Objective(model, part.teacher, last)
        tokens, rows = sum(map(loss.count, parts)), sum(len(batch["input_ids"]) for batch in parts)
        for batch in parts:
            with _answers(student) as seen:
                value = loss({name: data.to(model.device) for name, data in batch.items()}, tokens, rows)
            gradients = torch.autograd.grad(value, [out for out, _ in seen.values()])
            for (name, (_, difference)), gradient in zip(seen.items(), gradients, strict=True):
                by_head = -(gradient.double() * difference).sum((0, 1, 3)).cpu()
                costs[name] += by_head.unflatten(0, (len(layers[name].features), -1)).sum(1)
            report()
    return costs


@contextmanager
def _answers(student: Student) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Within the block the student answers as ever, and gradients pass as through softmax attention. Yields, by layer,
    its output [B, L, H, dv] in the last call, and what that of softmax attention is more than that."""
    layers = student.layers
    by_module = {student.model.get_submodule(name): name for name in layers}
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        smooth, _ = softmax_attention(module, query, key, value, mask, scaling, **kwargs)
        if module not in by_module:
            return smooth, None
        call = AttentionCall.of(by_module[module], module, query, key, value, mask, scaling, kwargs)
        with torch.no_grad():
            own, _ = layers[call.name](
                call.query, key, value, scaling=call.scaling, weight=call.weight, keeps_states=False
            )
            own = own.transpose(1, 2).contiguous()  # as transformers' own attention functions return it
        out = own + (smooth - smooth.detach())
        out = out if out.requires_grad else out.requires_grad_()  # nothing before the first layer trains
        seen[call.name] = out, smooth.detach() - own
        return out, None

    with visiting(student.model, None, attention):
        yield seen
