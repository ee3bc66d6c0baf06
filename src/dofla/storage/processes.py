"""The processes that train together: those that ``torchrun`` or ``accelerate launch`` started, or this one alone.

All of them do the same with the same data, but for two things: each takes its share of every batch, and only the first
writes files and shows progress. They must see the same files.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, distributed, nn

from dofla.errors import DoflaError
from dofla.storage.extras import extra

_REFUSED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
_TOGETHER = 2**23
"""Numbers that are summed in one exchange; a model's feature maps are many small tensors."""
_GRACE = 10
"""Seconds before a process follows another, for the launcher to see which was the first: it ends all then."""
_log = logging.getLogger(__name__)

Gather = Callable[[Tensor], Tensor]
"""A tensor of this process → [n, ...], those of all processes with a share of a batch; gradients reach one's own."""


def alone(own: Tensor) -> Tensor:
    """The :data:`Gather` of a batch that is not shared."""
    return own.unsqueeze(0)


@dataclass(frozen=True)
class Processes:
    """
    Attributes:
        count: of the processes.
        place: of this one, from 0.
        device: of this one; None where there is but one process, whose models stay where they are.
    """

    count: int = 1
    place: int = 0
    device: torch.device | None = None

    @property
    def home(self) -> torch.device:
        """Where this process computes if it may choose: its own device, or the accelerator if there is one."""
        if self.device is not None:
            return self.device
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")

    def share(self, batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Gather]:
        """This process's windows of a batch, and how to gather what the others make of theirs.

        A batch may have fewer windows than there are processes. Those left over get one that counts for nothing: they
        take part in every exchange, and what they give to it is dropped.
        """
        windows = len(next(iter(batch.values())))
        holders = min(self.count, windows)
        if self.count == 1:
            return dict(batch), alone
        own = torch.arange(windows).tensor_split(holders)[self.place if self.place < holders else 0]
        return {name: data[own] for name, data in batch.items()}, partial(self._gathered, holders=holders)

    def _gathered(self, own: Tensor, holders: int) -> Tensor:
        rows = [torch.empty_like(own) for _ in range(self.count)]
        _exchange(distributed.all_gather, rows, own.detach().contiguous())
        if self.place < holders:
            rows[self.place] = own
        return torch.stack(rows[:holders])

    def total(self, own: Tensor) -> Tensor:
        """The sum over all processes of a tensor that each has."""
        return own if self.count == 1 else self._gathered(own, self.count).sum(0)

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give each parameter the sum of its gradients in all processes."""
        if self.count == 1:
            return
        gradients = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        for part in _parts(gradients):
            flat = torch.cat([gradient.flatten() for gradient in part])
            _exchange(distributed.all_reduce, flat)
            for gradient, summed in zip(part, flat.split([x.numel() for x in part]), strict=True):
                gradient.copy_(summed.view_as(gradient))

    def make_alike(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with those of the first process."""
        if self.count > 1:
            for tensor in tensors:
                _exchange(distributed.broadcast, tensor.data, 0)

    def check_same_files(self, found: int, folder: str | Path | None) -> None:
        """DoflaError unless all processes have ``found`` as much in the folder."""
        if self.count > 1:
            numbers = self._gathered(torch.tensor(found, device=self.device), self.count)
            if (numbers != found).any():
                raise DoflaError(f"not all processes see the same files in {folder}: choose another folder")

    def wait(self) -> None:
        """Until all processes are here: what the first has written before, the others can read afterwards."""
        if self.count > 1:
            _exchange(distributed.barrier)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Within the block an error says in which of several processes it came up."""
        try:
            yield
        except Exception as error:
            if self.count == 1:
                raise
            name = f"process {self.place} of {self.count}"
            if isinstance(error, DoflaError):
                raise DoflaError(f"{name}: {error}") from error
            _log.error("%s ends: %s: %s", name, type(error).__name__, error)
            raise


ALONE = Processes()


def is_first() -> bool:
    """True if this process is to write files and show progress; decided without joining the others."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return int(os.environ.get("RANK", "0")) == 0


def number_started() -> int:
    """Number of processes that were started together, this one among them; counted without joining the others."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def processes() -> Processes:
    """Processes that were started together with this one, joined on the first call.

    Raises:
        DoflaError: accelerate is not installed, or set up to take weights apart.
    """
    started, count = distributed.is_available() and distributed.is_initialized(), number_started()
    if count == 1:
        return ALONE
    accelerate = extra("accelerate", purpose="training in several processes")
    # Without an accelerator, accelerate does not join processes unless it is told that they are to use the CPU.
    accelerator = accelerate.Accelerator(cpu=not torch.accelerator.is_available())
    if accelerator.num_processes != count:
        seen = accelerator.num_processes
        raise DoflaError(f"accelerate sees {seen} of {count} processes: make no Accelerator before")
    if (kind := accelerator.distributed_type.value) in _REFUSED:
        raise DoflaError(
            f"accelerate is set up for {kind}, which takes weights apart that are trained or merged whole here: launch "
            "data-parallel processes (examples/data_parallel.yaml)"
        )
    if not started:
        atexit.register(distributed.destroy_process_group)
    return Processes(accelerator.num_processes, accelerator.process_index, accelerator.device)


def _exchange(operation: Callable, *tensors) -> None:
    try:
        operation(*tensors)
    except RuntimeError as error:
        message = "the exchange with the other processes broke off: one of them has ended"
        _log.error("process %d: %s", distributed.get_rank(), message)
        time.sleep(_GRACE)
        raise DoflaError(message) from error


def _parts(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in lists of about :data:`_TOGETHER` numbers, each of one dtype and device."""
    part: list[Tensor] = []
    for tensor in tensors:
        alike = not part or (tensor.dtype, tensor.device) == (part[0].dtype, part[0].device)
        if part and (not alike or sum(map(torch.numel, part)) + tensor.numel() > _TOGETHER):
            yield part
            part = []
        part.append(tensor)
    if part:
        yield part
