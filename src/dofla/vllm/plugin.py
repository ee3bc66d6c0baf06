"""The entry point of vLLM's plug-ins: it makes the models, the cache and the checkpoints of dofla known."""

from __future__ import annotations

from functools import wraps
from typing import Any

from dofla.vllm import ARCHITECTURE, BACKEND, METHOD


def register() -> None:
    """Register with vLLM, in each of its processes; a second call changes nothing."""
    from vllm.config import CompilationConfig
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, MambaModelConfig
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend

    from dofla.vllm import checkpoint  # noqa: F401 - importing registers

    if ARCHITECTURE in ModelRegistry.models:
        return
    ModelRegistry.register_model(ARCHITECTURE, "dofla.vllm.model:DoflaForCausalLM")
    MODELS_CONFIG_MAP[ARCHITECTURE] = MambaModelConfig
    if BACKEND not in MambaAttentionBackendEnum.__members__:
        register_backend(BACKEND, "dofla.vllm.metadata.CompressedCacheBackend", is_mamba=True)
    CompilationConfig._attention_ops.append("vllm::dofla_attention")
    for name in ("inspect_model_cls", "resolve_model_cls"):
        setattr(ModelRegistry, name, _with_our_models(getattr(ModelRegistry, name)))


def _with_our_models(resolve: Any) -> Any:
    """A method of vLLM's registry that takes compressed checkpoints for :data:`ARCHITECTURE`: their config names the
    class of the original model, which vLLM would take otherwise."""

    @wraps(resolve)
    def resolved(architectures: str | list[str], model_config: Any) -> Any:
        if getattr(model_config.hf_config, "quantization_config", {}).get("quant_method") == METHOD:
            architectures = [ARCHITECTURE]
        return resolve(architectures, model_config)

    return resolved
