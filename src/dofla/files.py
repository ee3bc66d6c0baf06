"""Files that are whole or not there: written under a temporary name, then renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dofla.errors import DoflaError


@contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """A temporary folder beside ``folder`` that takes its name when the block ends well, and vanishes otherwise.

    Raises:
        DoflaError: if ``folder`` exists already or cannot be made.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DoflaError(f"{folder} exists already: choose another output folder or remove it")
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise DoflaError(f"cannot write to {folder.parent}: {error.strerror}") from error
    try:
        yield partial
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path that replaces the file ``path`` when the block ends well, and vanishes otherwise.

    Raises:
        DoflaError: if the system does not let it be written.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        raise DoflaError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            partial.unlink()


def write_json(path: str | Path, data: Any) -> None:
    """Write ``data`` as JSON a person can read."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: str | Path, what: str) -> Any:
    """Read a JSON object; DoflaError naming the file if it is missing or is not ``what`` it should be."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DoflaError(f"{path} does not exist: it should hold {what}") from None
    except IsADirectoryError:
        raise DoflaError(f"{path} is a folder: expected a file with {what}") from None
    except OSError as error:
        raise DoflaError(f"cannot read {path}: {error.strerror or error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DoflaError(f"{path} is not {what}: {error}") from error
    if not isinstance(data, dict):
        raise DoflaError(f"{path} is not {what}: expected a JSON object, got {type(data).__name__}")
    return data
