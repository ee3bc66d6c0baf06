"""The two sides of every figure, original and converted model, by one code path."""

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from transformers import PreTrainedModel

from dofla.integration.surgery import original

P = ParamSpec("P")
T = TypeVar("T")


def of_both(
    model: PreTrainedModel, measure: Callable[Concatenate[PreTrainedModel, P], T], *args: P.args, **given: P.kwargs
) -> tuple[T, T]:
    """``measure`` of the original, which the model is with softmax attention, and of the model."""
    with original(model):
        before = measure(model, *args, **given)
    return before, measure(model, *args, **given)
