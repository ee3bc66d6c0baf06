"""An estimate of how long ``dofla.fade`` takes for a model, without opening it."""

from __future__ import annotations

import time

import torch

from dofla.distillation.faded import BACK, TWICE
from dofla.integration.directions import WINDOWS

_LENGTH = 512
"""Tokens of a window."""
_ROWS, _WIDTH = 512, 2048
_SECONDS = 0.3
"""That products are timed for."""
_BESIDE = 1.0
"""Seconds that calibration takes for each that the products with the weights take: attention, codes, gradients of
both. Measured on SmolLM2-135M."""


def calibration_operations(per_token: float) -> float:
    """Operations of products with weights in calibration with :data:`~dofla.integration.directions.WINDOWS` windows.

    Each token is read once for its directions. Head budgets take a pass of the original, one of the student, and one
    backward, which is as much again since only activations have gradients; some of the text is read twice over.

    Args:
        per_token: operations of a forward pass for one token.
    """
    text = WINDOWS * _LENGTH
    repeated = 2 * BACK * (round(TWICE * WINDOWS) * _LENGTH // BACK)
    return per_token * (text + 3 * (text + repeated))


@torch.no_grad()
def operations_per_second(dtype: torch.dtype, device: torch.device) -> float:
    """Of a product of matrices on this machine: the best of some tenths of a second."""
    rows = torch.ones(_ROWS, _WIDTH, dtype=dtype, device=device)
    weight = torch.ones(_WIDTH, _WIDTH, dtype=dtype, device=device)
    best, begun = 0.0, time.perf_counter()
    while time.perf_counter() - begun < _SECONDS or not best:
        started = time.perf_counter()
        (rows @ weight).sum().item()  # waits for the device
        best = max(best, 2 * rows.numel() * _WIDTH / (time.perf_counter() - started))
    return best


def calibration_seconds(per_token: float, dtype: torch.dtype, device: torch.device) -> float:
    """Estimate, in seconds: the products with the weights at the speed of one that is timed here, and as much again
    as other work took beside them on the model where it was measured."""
    return _BESIDE * calibration_operations(per_token) / operations_per_second(dtype, device)
