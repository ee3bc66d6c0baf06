"""What a calibration has measured so far, in a file of this user until it is complete: after an interruption the same
calibration goes on from there."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from dofla.compression.directions import DirectionSums
from dofla.compression.eviction_error import Stream
from dofla.compression.known import cache_folder
from dofla.errors import DoflaError
from dofla.storage.fields import build
from dofla.storage.tensors import read_tensors, write_tensors

logger = logging.getLogger(__name__)

EVERY = 10.0
"""Seconds between two writes: what is measured faster is measured again."""


@dataclass
class Measured:
    """Sums over the batches that were read, and what followed."""

    directions: DirectionSums = field(default_factory=DirectionSums)
    streams: dict[str, Stream] = field(default_factory=dict)
    errors: dict[str, Tensor] = field(default_factory=dict)  # of eviction, by module, in the text
    copied: dict[str, Tensor] = field(default_factory=dict)  # in text that stands there twice
    kl: dict[str, float] = field(default_factory=dict)  # to the original on held-out batches, by head budgets


def file_of(fingerprint: str) -> Path:
    """The file of the calibration of such a model that was interrupted last."""
    return cache_folder() / f"{fingerprint}.unfinished"


@contextmanager
def unfinished(fingerprint: str, key: str) -> Iterator[tuple[Measured, Callable[[], None]]]:
    """What a calibration has measured, nothing if none with this ``key`` was interrupted, and a function that keeps it.
    The file vanishes when the block ends well."""
    path, written = file_of(fingerprint), time.monotonic()
    found = _read(path, key)
    if found.directions.batches:
        logger.warning("an interrupted calibration goes on: %d batches were read", found.directions.batches)

    def keep() -> None:
        nonlocal written
        if time.monotonic() - written >= EVERY:
            with suppress(DoflaError, OSError):  # it goes without
                path.parent.mkdir(parents=True, exist_ok=True)
                _write(path, key, found)
            written = time.monotonic()

    yield found, keep
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _write(path: Path, key: str, measured: Measured) -> None:
    tensors: dict[str, Tensor] = {}

    def apart(value: Any) -> dict[str, Any]:
        if isinstance(value, Tensor):
            tensors[name := str(len(tensors))] = value
            return {"tensor": name}
        return vars(value)

    write_tensors(path, tensors, {"measured": json.dumps(measured, default=apart), "key": key})


def _read(path: Path, key: str) -> Measured:
    """What the file holds; nothing if it is missing, damaged or of another calibration."""
    with suppress(DoflaError, KeyError, ValueError):
        tensors, metadata = read_tensors(path)
        if metadata["key"] == key:
            text = metadata["measured"]
            plain = json.loads(text, object_hook=lambda x: tensors[x["tensor"]] if x.keys() == {"tensor"} else x)
            return build(Measured, plain, str(path))
    return Measured()
