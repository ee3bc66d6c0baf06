"""Hidden states on their way from one layer to the next."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dofla.errors import DoflaError

_IN_MEMORY = 2**28
"""Bytes that are kept in memory; more go to a file without a name, which no crash leaves behind."""


class HiddenStates:
    """Hidden states [L, d] of windows, by fingerprint.

    Args:
        folder: where the file goes if there are many; default the system's temporary folder.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        place = None if folder is None else str(folder)
        self.file = tempfile.SpooledTemporaryFile(_IN_MEMORY, dir=place)  # noqa: SIM115 - see close
        self.places: dict[bytes, int] = {}

    def __contains__(self, window: bytes) -> bool:
        return window in self.places

    def write(self, window: bytes, states: Tensor) -> None:
        """Keep the states of a window; all must be of one size."""
        data = states.detach().cpu().contiguous().view(torch.uint8).numpy().data
        self.places[window] = len(self.places) * data.nbytes
        self.file.seek(self.places[window])
        self.file.write(data)

    def read(self, window: bytes, like: Tensor) -> Tensor:
        """The states of a window, on the CPU, of the shape and dtype of ``like``.

        Raises:
            DoflaError: they were never written.
        """
        if window not in self.places:
            raise DoflaError("a window was not run through the layer before this one: run the same ones in every turn")
        self.file.seek(self.places[window])
        data = bytearray(self.file.read(like.numel() * like.element_size()))
        return torch.frombuffer(data, dtype=like.dtype).view(like.shape)

    def clear(self) -> None:
        """Forget all windows."""
        self.places.clear()

    def close(self) -> None:
        """Give memory and file back."""
        self.file.close()


def fingerprints(batch: Mapping[str, Any]) -> list[bytes]:
    """One for each window of what a model is called with: its tokens, padding, positions (or pixels)."""
    tensors = [batch[name].cpu().contiguous() for name in sorted(batch) if isinstance(batch[name], Tensor)]
    rows = (b"".join(part.numpy().tobytes() for part in row) for row in zip(*tensors, strict=True))
    return [hashlib.blake2b(row, digest_size=16).digest() for row in rows]
