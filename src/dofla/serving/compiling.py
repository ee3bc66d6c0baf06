"""Tokens from a compiled graph: ``generate`` of a student, by torch.compile."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch._inductor.config as inductor
from torch import Tensor
from transformers import Cache, CompileConfig, PreTrainedModel

from dofla.attention.gpu.operators import update_constants
from dofla.errors import DoflaError
from dofla.integration.extending import Extension, extend
from dofla.integration.student import Student
from dofla.integration.wrapped import unwraps_its_model

_COMPILED = ("_compiled_call", "_last_compile_config")
"""Attributes of a model in which transformers keeps what it has compiled."""


@unwraps_its_model
def compile_generate(student: PreTrainedModel, config: CompileConfig | None = None) -> PreTrainedModel:
    """Let ``student.generate`` write its tokens from a graph that torch.compile makes of a step, weights and all.

    On a GPU the graph is a CUDA graph: a token is one launch instead of hundreds. On a CPU, products with the weights
    are most of what a token costs, and torch takes them as fast as memory allows only where they have been packed for
    that: inductor's ``freezing``. It packs them once, beside those that go on reading prompts, so what is done to the
    student's weights afterwards plays no part there. The first token takes half a minute; the graph serves for all
    lengths, as a state does not grow. A call with a cache of its own is compiled if that is a static one.

    Args:
        student: a linearized causal model.
        config: of torch.compile; default ``mode="reduce-overhead"`` on a GPU, ``mode="default"`` on a CPU.

    Returns:
        ``student`` itself.

    Raises:
        DoflaError: the model is not linearized, or writes no text; some of its layers are softmax, whose caches grow.
    """
    if not student.can_generate():
        raise DoflaError(f"{type(student).__name__} writes no text: there is no generate to compile")
    if any(layer.beside_softmax for layer in Student.of(student).layers.values()):
        raise DoflaError("some layers are softmax, and their cache grows: linearize them all to compile generate")
    extend(student, _Compiles, config)
    return student


def _default(on_gpu: bool) -> CompileConfig:
    if on_gpu:
        return CompileConfig(mode="reduce-overhead")
    config = CompileConfig(mode="default")
    # Otherwise transformers compiles on GPUs alone. Its default is None, and nothing says what else it may be.
    config._compile_all_devices = True  # type: ignore[assignment]
    return config


class _Compiles(Extension):
    """A student whose ``generate`` is compiled."""

    place, holder = 2, "_dofla_compile_config"
    _dofla_compile_config: CompileConfig | None

    def __getstate__(self) -> dict[str, Any]:
        # What transformers has compiled computes with this model's weights, in every copy.
        return {name: value for name, value in vars(self).items() if name not in _COMPILED}

    def generate(self, inputs: Tensor | None = None, *args: Any, **options: Any) -> Any:
        on_gpu = self.device.type != "cpu"
        if not any(isinstance(value, Cache) for value in options.values()):
            options.setdefault("cache_implementation", "static")
        options.setdefault("compile_config", self._dofla_compile_config or _default(on_gpu))
        if on_gpu:
            update_constants()
        # As an option of torch.compile it comes too late for dynamo, and does nothing.
        with nullcontext() if on_gpu else inductor.patch(freezing=True):
            return super().generate(inputs, *args, **options)
