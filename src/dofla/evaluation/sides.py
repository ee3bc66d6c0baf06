"""The two sides of every figure, original and converted model, by one code path; and progress over what is read."""

from collections.abc import Callable, Iterator, Sequence
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


def counted(parts: Sequence[T], progress: Callable[[int, int], None] | None) -> Iterator[T]:
    """The parts, one by one; ``progress`` is called with (done, total) when the next one is asked for."""
    for done, part in enumerate(parts, start=1):
        yield part
        if progress:
            progress(done, len(parts))
