"""Tokens from a compiled graph: ``generate`` of a student, by torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch._inductor.config as inductor
from torch import Tensor
from transformers import CompileConfig, PreTrainedModel

from dofla.errors import DoflaError
from dofla.integration.surgery import linear_layers


def compile_generate(student: PreTrainedModel, config: CompileConfig | None = None) -> PreTrainedModel:
    """Let ``student.generate`` write its tokens from a graph that torch.compile makes of a step, weights and all.

    Products with the weights are most of what a token costs, and on a CPU torch takes them as fast as memory allows
    only where they have been packed for that: inductor's ``freezing``. It packs them once, beside those that go on
    reading prompts, so what is done to the student's weights afterwards plays no part. The first token takes half a
    minute; the graph serves for all lengths, as a state does not grow. A call with a cache of its own is compiled if
    that is a static one.

    Args:
        student: a linearised causal model.
        config: of torch.compile; default its own.

    Returns:
        ``student`` itself.

    Raises:
        DoflaError: the model is not linearised, or writes no text; some of its layers are softmax, whose caches grow.
    """
    if not student.can_generate():
        raise DoflaError(f"{type(student).__name__} writes no text: there is no generate to compile")
    if any(layer.beside_softmax for layer in linear_layers(student).values()):
        raise DoflaError("some layers are softmax, and their cache grows: linearize them all to compile generate")
    if config is None:
        config = CompileConfig(mode="default")
        config._compile_all_devices = True  # otherwise transformers compiles on GPUs alone
    student.generate = _compiled(student.generate, config)
    return student


def _compiled(generate: Callable[..., Any], config: CompileConfig) -> Callable[..., Any]:
    @wraps(generate)
    def compiled(inputs: Tensor | None = None, *args: Any, **options: Any) -> Any:
        if options.get("past_key_values") is None:
            options.setdefault("cache_implementation", "static")
        with inductor.patch(
            freezing=True
        ):  # as an option of torch.compile it comes too late for dynamo, and does nothing
            return generate(inputs, *args, **{"compile_config": config, **options})

    return compiled
