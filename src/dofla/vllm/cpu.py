"""A gap of vLLM on CPUs (0.32): a block that a layer with a sliding window gets is not cleared. Its attention reads
free slots as well, with weight 0, and what a compressed cache left there may be no number."""

from functools import wraps

from torch import Tensor
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def clear_blocks_of_sliding_layers() -> None:
    """Let vLLM clear them as it does the blocks of other layers; a second call changes nothing."""
    clear = CPUModelRunner._zero_block_ids
    if hasattr(clear, "__wrapped__"):
        return

    @wraps(clear)
    def clear_all(runner: CPUModelRunner, block_ids: list[int]) -> None:
        clear(runner, block_ids)
        for layer in runner.compilation_config.static_forward_context.values():
            cache = getattr(layer, "kv_cache", None)
            if isinstance(cache, Tensor) and getattr(layer, "sliding_window", None) is not None:
                cache.unflatten(0, (runner.kv_cache_config.num_blocks, -1))[block_ids] = 0

    CPUModelRunner._zero_block_ids = clear_all
