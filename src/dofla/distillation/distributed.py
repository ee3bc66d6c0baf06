"""Training in several processes, through accelerate: each takes its share of every batch.

``torchrun`` or ``accelerate launch`` starts them. All must see the same files, which the main process alone writes.
"""

import atexit
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from dofla.errors import DoflaError
from dofla.storage.extras import extra
from dofla.storage.rank import rank, world_size


def to_device(model: nn.Module) -> None:
    """Move a model to the device of this process; of one process, it stays where it is."""
    if accelerator := joined():
        model.to(accelerator.device)


def share(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The windows of a batch that this process takes."""
    return {name: data[rank() :: world_size()] for name, data in batch.items()}


def gather(own: Tensor) -> Tensor:
    """A tensor of this process → [n, ...], those of all processes; gradients reach its own alone."""
    if not (accelerator := joined()):
        return own.unsqueeze(0)
    rows = list(accelerator.gather(own.detach().unsqueeze(0)))
    rows[rank()] = own
    return torch.stack(rows)


def add_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give each parameter the sum of its gradients in all processes."""
    if accelerator := joined():
        for parameter in parameters:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = accelerator.reduce(own, "sum")


def make_alike(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors with those of the main process."""
    if joined():
        extra("accelerate").utils.broadcast([tensor.data for tensor in tensors])


def wait() -> None:
    """Until all processes are here: what the main process has written before, the others can read afterwards."""
    if accelerator := joined():
        accelerator.wait_for_everyone()


def joined() -> Any:
    """accelerate's ``Accelerator`` of the processes that were started together, None if there is but this one;
    DoflaError if accelerate is not installed, or set up for anything but data-parallel processes (FSDP, DeepSpeed)."""
    return _join() if world_size() > 1 else None


@cache
def _join() -> Any:
    begun = torch.distributed.is_initialized()
    accelerate = extra("accelerate", "accelerate", "training in several processes")
    # Without an accelerator, accelerate does not join processes unless it is told that they are to use the CPU.
    accelerator = accelerate.Accelerator(cpu=not torch.accelerator.is_available())
    if not (kind := accelerator.distributed_type.value).startswith("MULTI_"):
        raise DoflaError(f"accelerate is set up for {kind}: use data-parallel processes (examples/data_parallel.yaml)")
    if not begun:
        atexit.register(torch.distributed.destroy_process_group)
    return accelerator
