"""Settings of vLLM that a compressed model needs."""

import logging

from vllm.config import VllmConfig
from vllm.model_executor.models.config import MambaModelConfig

from dofla.errors import DoflaError

logger = logging.getLogger(__name__)
FROM_THE_TEXT = ("ngram", "suffix")
"""Methods of speculative decoding that take candidates from the text so far."""
BLOCK = 512
"""Tokens from one state that prefix caching keeps to the next, unless ``--block-size`` says so: each is a page."""


class CompressedModelConfig(MambaModelConfig):
    """The settings of a model with states. Prefix caching keeps copies of them, each a block of tokens after the other,
    as for Mamba."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Choose the blocks of prefix caching, and how weights are read.

        Raises:
            DoflaError: candidates of another model; states that are to be moved to another engine.
        """
        speculative = vllm_config.speculative_config
        if speculative is not None and speculative.method not in FROM_THE_TEXT:
            raise DoflaError(
                f"beside compressed caches vLLM cannot have that of a draft model ({speculative.method!r}): give "
                "--speculative-config the method 'ngram', or leave it out"
            )
        if vllm_config.kv_transfer_config is not None:
            raise DoflaError("a compressed cache is not moved between engines: leave out --kv-transfer-config")
        cache = vllm_config.cache_config
        if cache.enable_prefix_caching and speculative is not None:
            logger.warning("prefix caching is off: beside speculative decoding, pages hold states after candidates")
            cache.enable_prefix_caching = False
        if cache.enable_prefix_caching and not cache.user_specified_block_size:
            cache.block_size, cache.user_specified_block_size = BLOCK, True
        weights = vllm_config.model_config.hf_config.quantization_config.get("weights") or {}
        if weights.get("quant_method") == "torchao":
            vllm_config.load_config.safetensors_load_strategy = "torchao"  # as vLLM does where the method is torchao
        super().verify_and_update_config(vllm_config)
