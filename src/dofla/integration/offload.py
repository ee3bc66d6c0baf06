"""Models larger than memory: accelerate's offload leaves weights on disk or in host memory until a module is called.

``device_map="auto"`` and ``offload_folder=...`` open such a model (:func:`dofla.load`, ``dofla --set offload=FOLDER``).
"""

from contextlib import AbstractContextManager, nullcontext
from itertools import chain

import torch
from torch import nn

from dofla.errors import DoflaError


def is_offloaded(model: nn.Module) -> bool:
    """True if weights of the model come to the device that computes only when they are needed."""
    return any(weight.is_meta for weight in model.parameters())


def device_of(module: nn.Module) -> torch.device:
    """The device that computes: that of the first weight, or where accelerate brings it if it waits elsewhere."""
    device = next(chain(module.parameters(), module.buffers())).device
    if device.type != "meta":
        return device
    hooks = [vars(part)["_hf_hook"] for part in module.modules() if "_hf_hook" in vars(part)]
    places = (getattr(own, "execution_device", None) for hook in hooks for own in getattr(hook, "hooks", [hook]))
    return torch.device(next((place for place in places if place is not None), device))


def check_in_memory(model: nn.Module, what: str) -> None:
    """DoflaError, naming ``what`` is to be done, if the model is offloaded."""
    if is_offloaded(model):
        raise DoflaError(f"{what} needs all weights in memory: open the model without offload (device_map)")


def loaded(module: nn.Module) -> AbstractContextManager:
    """Within the block the module's own weights are at hand, offloaded or not."""
    if not is_offloaded(module):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module)


def keep_in_memory(module: nn.Module) -> None:
    """Read offloaded weights for good: accelerate reads those of a module when it is called, and maps never are."""
    for part in module.modules():
        if (hook := vars(part).get("_hf_hook")) is not None:
            hook.pre_forward(part)
            for own in getattr(hook, "hooks", [hook]):
                own.offload = False
