"""Settings of vLLM that a compressed model needs."""

import logging

from vllm.config import VllmConfig
from vllm.model_executor.models.config import MambaModelConfig

from dofla.errors import DoflaError

logger = logging.getLogger(__name__)


class CompressedModelConfig(MambaModelConfig):
    """The settings of a model with states, without prefix caching: a state cannot be cut at a token."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Turn prefix caching off, and tell of it.

        Raises:
            DoflaError: speculative decoding, or states that are to be moved to another engine.
        """
        if vllm_config.speculative_config is not None:
            raise DoflaError(
                "a compressed cache cannot take back tokens that are rejected: leave out --speculative-config"
            )
        if vllm_config.kv_transfer_config is not None:
            raise DoflaError("a compressed cache is not moved between engines: leave out --kv-transfer-config")
        if vllm_config.cache_config.enable_prefix_caching:
            logger.warning("prefix caching is off: a compressed cache is not kept token by token")
            vllm_config.cache_config.enable_prefix_caching = False
        weights = vllm_config.model_config.hf_config.quantization_config.get("weights") or {}
        if weights.get("quant_method") == "torchao":
            vllm_config.load_config.safetensors_load_strategy = "torchao"  # as vLLM does where the method is torchao
        super().verify_and_update_config(vllm_config)
