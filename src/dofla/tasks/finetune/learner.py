"""Trainer of transformers: on one device, silent, without files."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from transformers import Trainer, TrainingArguments


class OneDevice(TrainingArguments):
    """Arguments of a Trainer that uses the device that accelerate names, not all GPUs from the first on."""

    @property
    def device(self) -> torch.device:
        """Place of model and batches; ``--device`` decides it by ACCELERATE_TORCH_DEVICE."""
        _ = super().device  # asks accelerate
        return self.distributed_state.device

    @property
    def n_gpu(self) -> int:
        """Number of devices that share a batch."""
        return 1


class Learner(Trainer):
    """Trainer with mixed precision in its forward passes alone: accelerate's would stay in ``model.forward``."""

    mixed_precision = "no"

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager:
        """Context of forward passes."""
        return torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.mixed_precision == "bf16")
