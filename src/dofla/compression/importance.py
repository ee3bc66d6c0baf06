"""Fitting what predicts the importance of tokens (:class:`dofla.layers.ImportancePredictor`) to second readings.

A text stands there twice in a row, and queries of the second time say how important the tokens of the first are.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofla.attention import attention_and_importance
from dofla.integration.recorder import AttentionCall, module_inputs, recording, run_body

FIRST = 16
"""Tokens of a text that do not count: attention sinks are none of the predictor's concern."""
RIDGE = 1e-2
"""Penalty of squared weights, relative to the second moment of the inputs that they are of."""
MOST = 65504.0
"""Size of a weight at most: float16 has no larger numbers, and an input that would need one says next to nothing."""
LEAST = 1e-4
"""Added to importance before its logarithm is taken: what is below does not matter."""


@dataclass
class _Fit:
    """Sums of a ridge regression of the logarithm of importance on the input of a layer."""

    moments: Tensor | float = 0.0  # [D + 1, D + 1], float32
    products: Tensor | float = 0.0  # [D + 1, Hkv], float32

    def add(self, hidden: Tensor, importance: Tensor) -> None:
        """Inputs [n, D], and importance [Hkv, n]."""
        inputs = torch.cat([hidden.float(), hidden.new_ones(len(hidden), 1, dtype=torch.float32)], 1)
        self.moments = self.moments + inputs.mT @ inputs
        self.products = self.products + inputs.mT @ (importance.float() + LEAST).log().mT

    def weight(self) -> Tensor:
        """The weight of the predictor [Hkv, D + 1], float16."""
        moments, products = (torch.as_tensor(x).double().cpu() for x in (self.moments, self.products))
        second = moments.diagonal().clamp_min(1e-12 * moments.diagonal().max())
        second[-1] = 0  # of the constant
        weight = torch.linalg.solve(moments + RIDGE * second.diag(), products).mT
        return weight.clamp(-MOST, MOST).to(torch.float16)


@torch.no_grad()
def measure_importance(
    model: PreTrainedModel, layers: Collection[str], texts: Collection[Tensor], read: Callable[[int], None]
) -> dict[str, Tensor]:
    """The weights of the predictors of layers [Hkv, D + 1], float16, by texts [n]; ``read`` gets the tokens that were
    read after each. A layer whose input is not that of its module's tokens has none."""
    fits = {name: _Fit() for name in layers}

    def look(call: AttentionCall) -> None:
        hidden, tokens = inputs.pop(call.name, None), call.query.shape[2] // 2
        if hidden is not None and hidden.shape[:2] == (1, 2 * tokens) and tokens > FIRST:
            vectors = call.query[:, :, tokens:], call.key, call.value
            importance = attention_and_importance(*vectors, call.scaling, tokens)[1]
            fits[call.name].add(hidden[0, FIRST:tokens], importance[0, :, FIRST:])

    with module_inputs(model, layers) as inputs, recording(model, layers, look):
        for text in texts:
            run_body(model, {"input_ids": text.repeat(2).unsqueeze(0)})
            read(2 * len(text))
    return {name: fit.weight() for name, fit in fits.items() if isinstance(fit.moments, Tensor)}
