"""Calibrations that go on after an interruption: a file of this user keeps the sums until they are complete."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from dofla.compression.directions import DirectionSums
from dofla.compression.eviction_error import Stream
from dofla.compression.known import cache_folder
from dofla.errors import DoflaError
from dofla.storage.fields import build
from dofla.storage.tensors import read_data, write_data

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
    """The sums of the calibration with this ``key``, empty unless it was interrupted, and a function that keeps them.
    Their file vanishes when the block ends well."""
    path, written = file_of(fingerprint), time.monotonic()
    found = _read(path, key)
    if found.directions.batches:
        logger.warning("an interrupted calibration goes on: %d batches were read", found.directions.batches)

    def keep() -> None:
        nonlocal written
        if time.monotonic() - written >= EVERY:
            with suppress(DoflaError, OSError):  # it goes without
                path.parent.mkdir(parents=True, exist_ok=True)
                write_data(path, found, key=key)
            written = time.monotonic()

    yield found, keep
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _read(path: Path, key: str) -> Measured:
    """The sums in the file; none if it is missing, damaged or of another calibration."""
    with suppress(DoflaError):
        data, metadata = read_data(path)
        if metadata.get("key") == key:
            return build(Measured, data, str(path))
    return Measured()
