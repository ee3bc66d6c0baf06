"""Settings of vLLM that a compressed model needs."""

import logging

from vllm.config import VllmConfig
from vllm.model_executor.models.config import MambaModelConfig

from dofla.errors import DoflaError
from dofla.vllm import CONNECTOR, FOLDER, HYBRID

logger = logging.getLogger(__name__)
FROM_THE_TEXT = ("ngram", "suffix")
"""Methods of speculative decoding that take candidates from the text so far."""
BLOCK = 512
"""Tokens from one state that prefix caching keeps to the next, each a page; ``--block-size`` says otherwise."""


class CompressedModelConfig(MambaModelConfig):
    """The settings of a model with states. Prefix caching keeps copies of them, each a block of tokens after the other,
    as for Mamba."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Choose the blocks of prefix caching, and how weights are read.

        Raises:
            DoflaError: candidates of another model; :func:`check_moves`.
        """
        speculative = vllm_config.speculative_config
        if speculative is not None and speculative.method not in FROM_THE_TEXT:
            raise DoflaError(
                f"beside compressed caches vLLM cannot have that of a draft model ({speculative.method!r}): give "
                "--speculative-config the method 'ngram', or leave it out"
            )
        cache = vllm_config.cache_config
        if vllm_config.kv_transfer_config is not None:
            check_moves(vllm_config)
            vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"  # a text without states is read
            cache.enable_prefix_caching = False  # its pages hold states of blocks
        if cache.enable_prefix_caching and speculative is not None:
            logger.warning("prefix caching is off: beside speculative decoding, pages hold states after candidates")
            cache.enable_prefix_caching = False
        if cache.enable_prefix_caching and not cache.user_specified_block_size:
            cache.block_size, cache.user_specified_block_size = BLOCK, True
        weights = vllm_config.model_config.hf_config.quantization_config.get("weights") or {}
        if weights.get("quant_method") == "torchao":
            vllm_config.load_config.safetensors_load_strategy = "torchao"  # as vLLM does where the method is torchao
        super().verify_and_update_config(vllm_config)


def check_moves(vllm_config: VllmConfig) -> None:
    """DoflaError unless states can be moved to files and back as ``--kv-transfer-config`` has it."""
    moves, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if moves.kv_connector != CONNECTOR:
        raise DoflaError(
            f"--kv-transfer-config: {moves.kv_connector!r} does not move compressed caches, {CONNECTOR!r} does"
        )
    if not moves.kv_connector_extra_config.get(FOLDER):
        example = f'"kv_connector_extra_config": {{"{FOLDER}": "sessions"}}'
        raise DoflaError(f"--kv-transfer-config: name the folder of conversations, {example}")
    others = {
        "--speculative-config": vllm_config.speculative_config is not None,
        "--tensor-parallel-size": parallel.tensor_parallel_size > 1,
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "layers that are kept softmax": vllm_config.model_config.architecture == HYBRID,
    }
    for other, asked in others.items():
        if asked:
            raise DoflaError(f"--kv-transfer-config: {CONNECTOR} moves no states beside {other}")
