"""One process at a time in a folder that a run writes to."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from dofla.errors import DoflaError
from dofla.storage.files import cannot_write, remove_leftovers
from dofla.storage.rank import is_main_process

_LOCK, _HOLDER = ".dofla.storage.lock", ".dofla.pid"


@contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Make ``folder`` if need be and keep other processes out for the time of the block.

    The system holds the lock, so one that is killed leaves none; what it left half written is removed. The processes of
    one launch (``accelerate``, ``torchrun``) share the folder: the main one holds the lock, for it alone writes.

    Raises:
        DoflaError: another process is at work there, or the system does not let it be written.
    """
    if not is_main_process():
        yield
        return
    folder = Path(folder)
    lock = FileLock(folder / _LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        raise DoflaError(
            f"{folder} is in use by {_holder(folder)}: wait for it, stop it, or choose another folder"
        ) from None
    except OSError as error:
        raise cannot_write(folder, error.errno) from error
    try:
        remove_leftovers(folder)
        try:
            (folder / _HOLDER).write_text(f"{os.getpid()}\n")
        except OSError as error:
            raise cannot_write(folder, error.errno) from error
        yield
    finally:
        lock.release()


def _holder(folder: Path) -> str:
    try:
        return f"process {int((folder / _HOLDER).read_text())}"
    except (OSError, ValueError):  # it has only just begun
        return "another process"
