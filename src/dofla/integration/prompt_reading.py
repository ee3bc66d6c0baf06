"""The softmax cache of a prompt that is read twice (:mod:`dofla.integration.second_reading`)."""

from collections.abc import Callable

from torch import Tensor
from transformers import DynamicCache


class PromptReading(DynamicCache):
    """A softmax cache with the attention that converted modules compute on it, as transformers calls one."""

    attend: Callable[..., tuple[Tensor, Tensor | None]]
