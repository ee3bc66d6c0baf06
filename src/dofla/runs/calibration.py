"""An estimate of how long ``dofla.compress`` takes for a model, without opening it."""

import time

import torch

from dofla.compression.calibrate import COPY_DISTANCE, HELD_OUT_TOKENS, OWN_TEXTS, PYTHON_TEXTS, READINGS
from dofla.compression.directions import LENGTH, WINDOWS
from dofla.compression.retrieval import FAR

_WIDTH = {"cpu": 1024}
_WIDE = 4096
"""Widths of the matrices that are timed: so small on a CPU that a busy one leaves some of the products alone."""
_SECONDS = 0.3  # duration of timing
_TIMES = 1.3
"""Seconds that calibration took for each of these products, in models of 4 M to 500 M parameters: attention, codes and
what is not a product take the rest."""


def calibration_operations(per_token: float) -> float:
    """Operations of products with weights in calibration on the default windows, if a forward pass takes ``per_token``
    of them for each token: each token is read once, and some twice in a row; then head budgets are compared on some, by
    a pass of the original and one of the compressed model with each; for the importance of tokens some are read twice
    in a row, and retrieval heads take a document with needles."""
    twice = 2 * COPY_DISTANCE * (1 + OWN_TEXTS + PYTHON_TEXTS)
    return per_token * (WINDOWS * LENGTH + twice + READINGS * HELD_OUT_TOKENS + FAR)


@torch.no_grad()
def operations_per_second(dtype: torch.dtype, device: torch.device) -> float:
    """Speed of a product of matrices on this machine: the best of some tenths of a second."""
    width = _WIDTH.get(device.type, _WIDE)
    rows, weight = (torch.ones(n, width, dtype=dtype, device=device) for n in (width // 4, width))
    best, begun = 0.0, time.perf_counter()
    while time.perf_counter() - begun < _SECONDS or not best:
        started = time.perf_counter()
        (rows @ weight)[0, 0].item()  # waits for the device
        best = max(best, 2 * rows.numel() * width / (time.perf_counter() - started))
    return best


def calibration_seconds(per_token: float, dtype: torch.dtype, device: torch.device) -> float:
    """Estimate, in seconds: :func:`calibration_operations`, at the speed of a product that is timed here, times what
    these are of the whole."""
    return _TIMES * calibration_operations(per_token) / operations_per_second(dtype, device)
