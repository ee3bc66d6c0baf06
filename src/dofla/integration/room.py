"""Room on disk and in memory, looked at before work begins that needs it."""

import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from dofla.display import size
from dofla.errors import DoflaError
from dofla.integration.quantizer import METHOD
from dofla.integration.weightless import without_weights

logger = logging.getLogger(__name__)
_MEMORY = Path("/proc/meminfo")


def check_disk(folder: str | Path, needed: float, what: str) -> None:
    """DoflaError unless the disk of a folder, which may be one to come, has so many bytes free for ``what``."""
    path = Path(folder).absolute()
    free = shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free
    if needed > free:
        raise DoflaError(
            f"too little room on the disk of {folder}: {what} takes {size(needed)}, {size(free)} are free: make room, "
            "or choose a folder on another disk"
        )


def available_memory(device: torch.device) -> int | None:
    """Bytes that can be taken on a device; None where the system does not say."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    with suppress(OSError, LookupError, ValueError):
        lines = dict(line.split(":") for line in _MEMORY.read_text(encoding="utf-8").splitlines())
        return 1024 * sum(int(lines[name].split()[0]) for name in ("MemAvailable", "SwapFree"))
    return None


def warn_if_short(needed: int, device: torch.device, what: str, way_out: str) -> None:
    """A warning if ``what`` needs more bytes than there are on a device."""
    available = available_memory(device)
    if available is not None and needed > available:
        logger.warning("too little memory: %s, %s are available: %s", what, size(available), way_out)


def warn_of_memory(config: PreTrainedConfig, build: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """A warning if the weights of the model that ``build`` makes of a config, opened with these options, are more than
    the memory available. A system that is short of memory may still read them again and again from the disk, or stop
    the process. Nothing is said of weights that are quantized, or that accelerate places."""
    quantized = getattr(config, "quantization_config", None) or {"quant_method": METHOD}
    if "device_map" in options or quantized.get("quant_method") != METHOD:
        return
    with suppress(Exception):  # a config with a wrong field, which fails in any way
        kinds = options.get("dtype"), config.dtype, torch.float32
        dtype = next(kind for kind in kinds if isinstance(kind, torch.dtype))
        needed = without_weights(config, build).num_parameters() * dtype.itemsize
        what = f"the weights take {size(needed)} in {str(dtype).removeprefix('torch.')}"
        way_out = "open the model with device_map='auto' and offload_folder=FOLDER (--set offload=FOLDER)"
        warn_if_short(needed, torch.device("cpu"), what, f"close other programs, or {way_out}")
