"""Tokens from a compiled graph: ``generate`` of a compressed model, by torch.compile."""

import hashlib
import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from inspect import signature
from typing import Any

import torch
import torch._inductor.config as inductor
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import Cache, CompileConfig, PreTrainedModel

from dofla.attention.gpu.operators import update_constants
from dofla.errors import DoflaError
from dofla.integration.converted import Converted
from dofla.integration.offload import device_of
from dofla.serving.models import view, writing

logger = logging.getLogger(__name__)

_SILENT = {"max_autotune_report_choices_stats": False, "autotune_num_choices_displayed": 0}
PACKED = {
    "freezing": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP,ATEN",
    **{name: value for name, value in _SILENT.items() if hasattr(inductor, name)},
}
"""Settings of inductor on a CPU: weights are packed into the graph, and of each shape of product inductor tries its own
code and a library's. For one row its own is faster, and for eight rows the library's may be."""


class Weights(CustomGraphPass):
    """A pass that changes no graph. Inductor keeps graphs on disk under a key that leaves out the weights packed into
    them, but for what its passes say of themselves: this one is a digest of all parameters and buffers.

    Args:
        model: whose linear layers have plain weights, or all of them weights made of plain tensors (torchao's);
            TypeError for others.

    Attributes:
        digest: in hexadecimal digits.
        plain: True if products are with plain weights. Those of torchao are taken as they are in bfloat16 alone; in
            float32 the graph has plain ones made of them.
    """

    def __init__(self, model: nn.Module) -> None:
        weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
        kinds = {type(weight) is nn.Parameter or weight.dtype == torch.float32 for weight in weights}
        if len(kinds) > 1:
            raise TypeError("weights of linear layers are plain here and quantized there")
        self.plain = kinds != {False}
        found = hashlib.blake2b(digest_size=16)
        for tensors in (model.named_parameters(), model.named_buffers()):
            for name, tensor in tensors:
                for part in _parts(tensor):
                    found.update(f"{name} {part.dtype} {list(part.shape)}".encode())
                    found.update(part.detach().contiguous().flatten().view(torch.uint8).numpy().data)
        self.digest = found.hexdigest()

    def __call__(self, graph: torch.fx.Graph) -> None:
        pass

    def uuid(self) -> str:
        return self.digest


class CompiledModel:
    """A compressed model whose ``generate`` writes tokens from a graph that torch.compile makes of a step.

        compiled = dofla.serving.CompiledModel(model)
        compiled.generate(input_ids, max_new_tokens=200)

    The first token takes more than a minute; in a later process, with the same weights, a fifth of that, as torch
    keeps the graph on disk (in ``TORCHINDUCTOR_CACHE_DIR``, with a copy of the weights). The graph serves for all
    lengths up to the longest that is asked for. On a GPU it is a CUDA graph: a token is one launch instead of hundreds.
    On a CPU, products with the weights are most of what a token costs, and torch takes them as fast as memory allows
    only where they are packed for that (:data:`PACKED`). They are packed once, beside those that go on reading prompts,
    and again when these have been replaced, moved or written to in place (an optimizer's step, ``load_state_dict``),
    when modules begin or end training, and when the model is restored. What is written through ``weight.data``, or to
    another attribute of a module, leaves no trace: make another.

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
        self._marks: list[Any] = []
        self._settings: dict[str, Any] = {}  # of inductor
        self._own: Any = None

    def generate(self, *args: Any, **options: Any) -> Any:
        """The result of ``model.generate``. A call with a cache of its own is compiled if that is a static one."""
        on_gpu = device_of(self.model).type != "cpu"
        marks = [] if on_gpu else _marks(self.model)  # a CUDA graph reads the weights of the model
        if self._own is None or marks != self._marks:
            logger.warning("torch.compile makes a graph of a token's step, which takes a minute or two the first time")
            self._settings = {} if on_gpu else settings(self.model)
            self._own, self._config, self._marks = view(self.model), self._fresh(on_gpu), marks
        if not any(isinstance(value, Cache) for value in options.values()):
            options.setdefault("cache_implementation", "static")
        if on_gpu:
            update_constants()
        with inductor.patch(self._settings):  # as an option of torch.compile freezing comes too late, and does nothing
            return self._own.generate(*args, compile_config=self._config, **options)

    def _fresh(self, on_gpu: bool) -> CompileConfig:
        """The config, such that no graph that was made before is used."""
        if on_gpu:
            return self.config
        config = copy(self.config)
        vars(config).update(own_graph(self.model, config.backend))
        config._compile_all_devices = True  # type: ignore[assignment] # otherwise on GPUs alone
        return config


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor is made of; TypeError if it does not say which."""
    if type(tensor) in (Tensor, nn.Parameter):
        return [tensor]
    if not is_traceable_wrapper_subclass(tensor):
        raise TypeError(type(tensor).__name__)
    return [part for name in tensor.__tensor_flatten__()[0] for part in _parts(getattr(tensor, name))]


def settings(model: nn.Module) -> dict[str, Any]:
    """Settings of inductor on a CPU: :data:`PACKED`, and what makes it keep the graph on disk for other processes, if
    :class:`Weights` knows all weights and nobody has a pass of his own there."""
    if inductor.post_grad_custom_post_pass is not None:
        return PACKED
    try:
        return PACKED | {"post_grad_custom_post_pass": Weights(model)}
    except TypeError:
        return PACKED


def own_graph(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> dict[str, Any]:
    """Arguments of torch.compile for a graph that serves one model as it is now. Where torch can do without, a call
    does not ask each module whether it has changed, which takes milliseconds, and graphs of other models do not count
    towards the number of those that torch makes."""
    layers = {id(module) for module in model.modules() if hasattr(module, "layer_idx")}

    def needed(guards: Sequence[Any]) -> Sequence[bool]:
        # Where a graph breaks, layers have graphs of their own, which are told apart by their modules.
        if layers and layers <= {id(guard.value) for guard in guards if guard.has_value}:
            return torch.compiler.skip_guard_on_all_nn_modules_unsafe(guards)
        return [True] * len(guards)

    compile = lookup_backend(backend)

    def compiled(*graph: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="TypedStorage")  # inductor's own, while it tries products
            warnings.filterwarnings("ignore", message="TF32 acceleration")  # of the flags below, which set all
            # Tensors packed by mkldnn cannot be kept on disk; those that inductor packs itself can. Weights in int8 are
            # not packed, and their products go by patterns that inductor has with mkldnn alone.
            kept = inductor.post_grad_custom_post_pass
            with torch.backends.mkldnn.flags(enabled=False) if getattr(kept, "plain", False) else nullcontext():
                return compile(*graph)

    filters = hasattr(torch.compiler, "skip_guard_on_all_nn_modules_unsafe")
    apart = "isolate_recompiles" in signature(torch.compile).parameters
    return {
        # Of calls that look alike, torch keeps one graph for each backend, whatever weights are packed into it.
        "backend": compiled,
        "mode": None,
        "options": {"guard_filter_fn": needed} if filters else {},
        **({"isolate_recompiles": True} if apart else {}),
    }


def _marks(model: PreTrainedModel) -> list[Any]:
    """Marks of what a graph is made of: of the weights, which are others for weights that were replaced, moved or
    written to in place; the attention that the model runs; and the mode of its modules."""
    weights = [
        (x.data_ptr() if type(x) is nn.Parameter else id(x), 0 if x.is_inference() else x._version)
        for x in model.parameters()
    ]
    return [weights, model.config._attn_implementation, [module.training for module in model.modules()]]
