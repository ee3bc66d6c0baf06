"""A test of whether a processor multiplies numbers of half precision, or takes them apart one by one."""

import logging
from functools import lru_cache

import torch

logger = logging.getLogger(__name__)

HALF = (torch.bfloat16, torch.float16)


def is_slow(dtype: torch.dtype) -> bool:
    """True if this processor has no instructions for products in ``dtype``, which then take some fifty times as long
    as in float32. Asked of PyTorch instead of measured: a busy machine must not open a model in another precision."""
    if dtype not in HALF:
        return False
    name = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    return not (torch.backends.mkldnn.is_available() and getattr(torch.ops.mkldnn, name)())


def half_is_slow() -> bool:
    """True if models are better opened in float32 here, however they are saved: no GPU, and a processor without
    instructions for bfloat16."""
    return not torch.cuda.is_available() and is_slow(torch.bfloat16)


@lru_cache
def warn_of_slow_products(device: torch.device, dtype: torch.dtype) -> None:
    """Say so, once, if a model of half precision stands on a processor without instructions for it."""
    if device.type == "cpu" and is_slow(dtype):
        logger.warning(
            "this processor has no instructions for products in %s and is many times faster in float32: open the model "
            "with dtype=torch.float32 (--set dtype=float32), which takes twice the memory for weights",
            str(dtype).removeprefix("torch."),
        )
