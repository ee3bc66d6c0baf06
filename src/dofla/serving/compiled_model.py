"""Tokens from a compiled graph: ``generate`` of a compressed model, by torch.compile."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch._inductor.config as inductor
from torch import nn
from torch._dynamo import lookup_backend
from transformers import Cache, CompileConfig

from dofla.attention.gpu.operators import update_constants
from dofla.errors import DoflaError
from dofla.integration.converted import Converted
from dofla.integration.offload import device_of
from dofla.serving.models import view, writing


class CompiledModel:
    """A compressed model whose ``generate`` writes tokens from a graph that torch.compile makes of a step.

        compiled = dofla.serving.CompiledModel(model)
        compiled.generate(input_ids, max_new_tokens=200)

    The first token takes half a minute. The graph serves for all lengths, as a state does not grow. On a GPU it is a
    CUDA graph: a token is one launch instead of hundreds. On a CPU, products with the weights are most of what a token
    costs, and torch takes them as fast as memory allows only where they are packed for that: inductor's ``freezing``.
    They are packed once, beside those that go on reading prompts, and again when these have been replaced, moved or
    written to in place (an optimizer's step, ``load_state_dict``). What is written through ``weight.data`` leaves no
    trace: make another.

    Args:
        model: a compressed causal language model, which stays as it is.
        config: of torch.compile; default ``mode="reduce-overhead"``. Modes and options are for GPUs.

    Raises:
        DoflaError: the model is not compressed, or writes no text; some of its layers are softmax, whose caches grow.
    """

    def __init__(self, model: nn.Module, config: CompileConfig | None = None) -> None:
        self.model, self.config = writing(model), config or CompileConfig()
        if any(layer.beside_softmax for layer in Converted.of(self.model).layers.values()):
            raise DoflaError("some layers are softmax, and their cache grows: compress them all to compile generate")
        self._weights: list[tuple[int, int]] | None = None
        self._own: Any = None

    def generate(self, *args: Any, **options: Any) -> Any:
        """The result of ``model.generate``. A call with a cache of its own is compiled if that is a static one."""
        on_gpu = device_of(self.model).type != "cpu"
        weights = [] if on_gpu else _marks(self.model)  # a CUDA graph reads those of the model
        if weights != self._weights:
            self._own, self._config, self._weights = view(self.model), self._fresh(on_gpu), weights
        if not any(isinstance(value, Cache) for value in options.values()):
            options.setdefault("cache_implementation", "static")
        if on_gpu:
            update_constants()
        # As an option of torch.compile it comes too late for dynamo, and does nothing.
        with nullcontext() if on_gpu else inductor.patch(freezing=True):
            return self._own.generate(*args, compile_config=self._config, **options)

    def _fresh(self, on_gpu: bool) -> CompileConfig:
        """The config, such that no graph that was made before is used."""
        if on_gpu:
            return self.config
        compile = lookup_backend(self.config.backend)
        # Of calls that look alike, torch keeps one graph for each backend, whatever weights are packed into it.
        config = replace(self.config, backend=lambda *graph: compile(*graph), mode="default", options=None)
        config._compile_all_devices = True  # type: ignore[assignment] # otherwise on GPUs alone
        return config


def _marks(model: nn.Module) -> list[tuple[int, int]]:
    """Marks of the weights, which are others for weights that were replaced, moved or written to in place."""
    return [
        (x.data_ptr() if type(x) is nn.Parameter else id(x), 0 if x.is_inference() else x._version)
        for x in model.parameters()
    ]
