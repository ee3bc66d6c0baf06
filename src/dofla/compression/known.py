"""Calibrations that were made before: this user's, those that come with dofla, and those on the hub."""

import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from huggingface_hub import constants
from transformers.utils import cached_file

from dofla.compression.calibration import SAME, Calibration, difference
from dofla.compression.target import Target
from dofla.errors import DoflaError

logger = logging.getLogger(__name__)

BASE = "base"
"""The word for the calibration of any model of the same shapes: of the one that this was fine-tuned from."""
SHIPPED = Path(__file__).with_name("calibrations")
PLACE = "DOFLA_CALIBRATIONS"
"""Variable of the environment: another repository of the hub, or a folder, to look for calibrations in."""
_DAY = 86400  # seconds


def known(target: Target, *, base: bool = False) -> Calibration | None:
    """The calibration of a model that was made before, of the same weights or, for ``base``, of those most like them;
    None if there is none. The log says where it is from."""
    for place, paths in _places(target):
        found = []
        for path in paths:
            try:
                found.append((difference(target.weights, (own := Calibration.load(path)).weights), str(path), own))
            except DoflaError as error:
                logger.warning("passed over: %s", error)
        for off, _, own in sorted(found, key=lambda x: x[:2]):
            whole = own.fingerprint == target.fingerprint and all(x.name in own.directions for x in target.compressed)
            if whole and (base or off <= SAME):
                logger.warning("the calibration of %s %s is used", own.model or "this model", place)
                return own
    return None


def keep(calibration: Calibration, folder: Path) -> None:
    """Keep a calibration as a file in a folder, unless nothing can be written there."""
    name = re.sub("[^A-Za-z0-9.]+", "-", Path(calibration.model).name) or "model"
    path = folder / f"{calibration.fingerprint}-{name}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        calibration.save(path)
    except (DoflaError, OSError) as error:
        logger.info("the calibration is not kept: %s", error)
    else:
        logger.info("the calibration is kept in %s", path)


def cache_folder() -> Path:
    """The folder of this user's calibrations."""
    return Path(constants.HF_HOME) / "dofla" / "calibrations"


def unfinished(fingerprint: str) -> Path:
    """The folder of what interrupted calibrations of a model with these attention modules have measured."""
    return cache_folder() / f"{fingerprint}.unfinished"


def interrupted(folder: Path) -> Calibration | None:
    """The calibration that a folder in there holds, as far as it came; None if there is none."""
    with suppress(DoflaError):  # damaged
        for path in folder.glob("*.safetensors"):
            found = Calibration.load(path)
            logger.warning("an interrupted calibration goes on (%s)", path)
            return found
    return None


def forget(folder: Path) -> None:
    """Remove a folder in there, and those not written to for a day; another process may write to others."""
    for other in [*folder.parent.glob("*")]:
        with suppress(OSError):  # another process removes it
            if other == folder or time.time() - other.stat().st_mtime > _DAY:
                shutil.rmtree(other)
    with suppress(OSError):
        folder.parent.rmdir()


def _places(target: Target) -> Iterator[tuple[str, list[Path]]]:
    """Where calibrations may be, in words, and the files there that may be of the model."""
    pattern, hub = f"{target.fingerprint}-*.safetensors", os.environ.get(PLACE, "dofla/calibrations")
    yield "in your cache", sorted(cache_folder().glob(pattern))
    if Path(hub).is_dir():
        yield f"in {hub}", sorted(Path(hub).glob(pattern))
    yield "among those that come with dofla", sorted(SHIPPED.glob(pattern))
    if "/" in target.name and not Path(hub).is_dir() and not Path(target.name).exists():  # it came from the hub
        quietly = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        path = None
        with suppress(OSError):  # there is no such repository, which transformers raises whatever it is told
            path = cached_file(hub, f"{target.name}.safetensors", **quietly, _raise_exceptions_for_gated_repo=False)
        yield f"of {hub} on the hub", [Path(path)] if path else []
