"""The entry point of vLLM's plug-ins: it makes the models, the cache and the checkpoints of dofla known."""

import logging
from functools import wraps
from typing import Any

from dofla.plans.layers import SoftmaxLayer
from dofla.vllm import ARCHITECTURE, BACKEND, CONNECTOR, HYBRID, METHOD

logger = logging.getLogger(__name__)
LEAST = (0, 32)
"""The oldest vLLM that the plug-in is tested with."""


def register() -> None:
    """Register with vLLM, in each of its processes; a second call changes nothing. A vLLM that is too old gets a
    message instead, which stands above its own that it does not know such checkpoints."""
    import vllm

    if vllm.__version_tuple__[:2] < LEAST:
        logger.error(
            "compressed models need vLLM %d.%d or newer, this is %s: install it anew", *LEAST, vllm.__version__
        )
        return
    from vllm.config import CompilationConfig, ModelConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.v1.attention.backends.registry import register_backend

    from dofla.vllm import checkpoint  # noqa: F401 - importing registers
    from dofla.vllm.config import CompressedModelConfig

    if ARCHITECTURE in ModelRegistry.models:
        return
    for name in (ARCHITECTURE, HYBRID):
        ModelRegistry.register_model(name, f"dofla.vllm.model:{name}")
        MODELS_CONFIG_MAP[name] = CompressedModelConfig
    KVConnectorFactory.register_connector(CONNECTOR, "dofla.vllm.sessions", "SessionConnector")
    register_backend(BACKEND, "dofla.vllm.metadata.CompressedCacheBackend", is_mamba=True)
    CompilationConfig._attention_ops.append("vllm::dofla_attention")
    for name in ("inspect_model_cls", "resolve_model_cls"):
        setattr(ModelRegistry, name, _with_our_models(getattr(ModelRegistry, name)))
    # vLLM takes a model for one without states where its config names attention layers alone.
    of_vllm = ModelConfig.is_hybrid.fget
    ModelConfig.is_hybrid = property(lambda own: _architecture(own) == HYBRID or of_vllm(own))


def _with_our_models(resolve: Any) -> Any:
    """A method of vLLM's registry that takes compressed checkpoints for models of dofla: their config names the class
    of the original model, which vLLM would take otherwise."""

    @wraps(resolve)
    def resolved(architectures: str | list[str], model_config: Any) -> Any:
        own = _architecture(model_config)
        return resolve(architectures if own is None else [own], model_config)

    return resolved


def _architecture(model_config: Any) -> str | None:
    """The name of a compressed checkpoint's class; None for all other checkpoints."""
    plan = getattr(model_config.hf_config, "quantization_config", None) or {}
    if plan.get("quant_method") != METHOD:
        return None
    compressed = sum(layer["kind"] != SoftmaxLayer.kind for layer in plan["layers"].values())
    return ARCHITECTURE if compressed == model_config.hf_text_config.num_hidden_layers else HYBRID
