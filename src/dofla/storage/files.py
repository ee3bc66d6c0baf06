"""Files that are whole or not there, written under a temporary name, then renamed.

What a process that was killed leaves, ``.NAME.partial-PID``, is never read, and goes when NAME is written again or the
folder is locked (:func:`dofla.storage.lock.locked`).
"""

import errno
import glob
import hashlib
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dofla.errors import DoflaError
from dofla.storage.rank import is_main_process

_WAYS_OUT = {
    errno.ENOSPC: "make room, then start again",
    errno.EDQUOT: "make room, then start again",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), then start again",
    errno.EROFS: "choose another folder",
    errno.EACCES: "choose another folder, or allow writing to this one",
    errno.EPERM: "choose another folder, or allow writing to this one",
    errno.EIO: "check the disk",
    errno.ENOTEMPTY: "another process has made it meanwhile",
}
logger = logging.getLogger(__name__)


@contextmanager
def new_folder(folder: str | Path, replaced: bool = False) -> Iterator[Path]:
    """A temporary folder of the same name that takes the place of ``folder`` when the block ends well, and vanishes
    otherwise; and in any case in a process other than the main one. One that is ``replaced`` stays as it is until then.

    Raises:
        DoflaError: if ``folder`` holds something and is not to be ``replaced``, or the system does not let it be
            written.
    """
    folder, writes = Path(folder), is_main_process()
    if writes and folder.exists() and not replaced and (not folder.is_dir() or any(folder.iterdir())):
        raise DoflaError(f"{folder} exists already: choose another output folder or remove it")
    with _temporary(folder, parents=True) as partial:
        (partial / folder.name).mkdir()
        yield partial / folder.name
        if not writes:
            return
        _to_disk(partial)
        if replaced and folder.exists():
            folder.rename(partial / f"{folder.name}.before")
        elif folder.exists():
            folder.rmdir()
        (partial / folder.name).rename(folder)
    logger.debug("wrote %s", folder)


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path of the same name that replaces ``path`` when the block ends well, and vanishes otherwise; and in
    any case in a process other than the main one. DoflaError if the system does not let it be written."""
    path = Path(path)
    with _temporary(path) as partial:
        yield partial / path.name
        if not is_main_process():
            return
        _to_disk(partial)
        (partial / path.name).replace(path)
    logger.debug("wrote %s", path)


@contextmanager
def _temporary(path: Path, parents: bool = False) -> Iterator[Path]:
    """A folder beside ``path`` for the time of the block, since libraries put temporary files of their own beside what
    they write; what the disk refuses becomes one line about ``path``. Processes other than the main one get a folder
    elsewhere."""
    if not is_main_process():
        with tempfile.TemporaryDirectory() as elsewhere:
            yield Path(elsewhere)
        return
    if not path.name:
        raise DoflaError(f"cannot write {str(path)!r}: give a name")
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        for leftover in path.parent.glob(glob.escape(f".{path.name}.partial-") + "*"):
            if leftover == partial or not _alive(leftover.name.rpartition("-")[2]):
                shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=parents)
        yield partial
    except DoflaError:
        raise
    except Exception as error:
        code, place = _refusal(error), getattr(error, "filename", None)
        ours = str(place).startswith((str(partial), str(path))) if place else code in _WAYS_OUT or not partial.exists()
        if code is None or not ours:
            raise
        raise cannot_write(path, code) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def cannot_write(path: str | Path, code: int | None) -> DoflaError:
    """The error for a path that the system, with this errno, does not let be written."""
    reason, way_out = (os.strerror(code), _WAYS_OUT.get(code)) if code else ("the system refuses", None)
    return DoflaError(f"cannot write {path}: {reason}" + (f": {way_out}" if way_out else ""))


def _refusal(error: Exception) -> int | None:
    """The errno of what the system refused; libraries written in Rust say it in words only."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


def _alive(pid: str) -> bool:
    if os.name != "posix" or not pid.isdecimal():
        return True  # not known
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _to_disk(folder: Path) -> None:
    """Wait until what is in the folder would survive a power cut, so that no name ever stands for less."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left in a folder and below; no process may be writing there."""
    for leftover in list(folder.rglob(".*.partial-*")):
        logger.info("removing %s, left by a process that was killed", leftover)
        shutil.rmtree(leftover, ignore_errors=True)


def plain(value: Any) -> Any:
    """Convert a value to what JSON can hold: text for paths, null for numbers that are not finite."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value


def write_json(path: str | Path, data: Any) -> None:
    """Write ``data`` as JSON a person can read."""
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    with replacing(path) as partial:
        partial.write_bytes(text.encode("utf-8", "backslashreplace"))  # halves of characters, as JSON has them


def read_json(path: str | Path, what: str) -> Any:
    """Read a JSON object; DoflaError naming the file if it is missing, or is not ``what`` it should be."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DoflaError(f"{path} does not exist: it should hold {what}") from None
    except IsADirectoryError:
        raise DoflaError(f"{path} is a folder: expected a file with {what}") from None
    except OSError as error:
        raise DoflaError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DoflaError(f"{path} is not {what}: {error}") from error
    if not isinstance(data, dict):
        raise DoflaError(f"{path} is not {what}: expected a JSON object, got {type(data).__name__}")
    return data


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits; a second per gigabyte or so."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
