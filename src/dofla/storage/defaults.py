"""Tensors of which nobody says where they are to be, in what numbers, or whether gradients may pass."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def torchs_defaults() -> Iterator[None]:
    """Within the block, or a function that this decorates, orders of windows, draws and figures are on the CPU and of
    float32, as if ``torch.set_default_device`` and ``torch.set_default_dtype`` had not been called. What meets the
    model's tensors is made like them in any case. Nor does ``torch.inference_mode`` hold: what is made would never
    train again."""
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        # A device in force costs every operation some microseconds.
        if (torch.get_default_device().type, dtype) != ("cpu", torch.float32):
            stack.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
            stack.enter_context(torch.device("cpu"))
        yield
