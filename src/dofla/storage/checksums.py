"""Digests of the files of a standalone checkpoint, which transformers writes and others may edit: kept beside them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from dofla.errors import DoflaError
from dofla.storage.files import read_json, write_json

CHECKSUMS = "checksums.json"
_BLOCK = 1 << 20


def write_checksums(folder: Path) -> None:
    """Write the SHA-256 of the config and the weights in a folder."""
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    write_json(folder / CHECKSUMS, {path.name: _digest(path) for path in files if path.is_file()})


def renew_checksum(path: Path) -> None:
    """The same of one file that was changed, if there are checksums."""
    place = path.parent / CHECKSUMS
    if place.exists():
        write_json(place, read_json(place, "checksums") | {path.name: _digest(path)})


def check_checksums(folder: Path) -> None:
    """See that the files are what they were, if there are checksums; a second per gigabyte or so.

    Raises:
        DoflaError: naming the first that is not.
    """
    if not (folder / CHECKSUMS).exists():
        return
    for name, digest in read_json(folder / CHECKSUMS, "checksums").items():
        path = folder / name
        try:
            found = _digest(path)
        except OSError as error:
            raise DoflaError(f"cannot load model {str(folder)!r}: {path}: {error.strerror}") from error
        if found != digest:
            raise DoflaError(
                f"cannot load model {str(folder)!r}: {name} is damaged, or was edited: copy it again, or, to keep it, "
                f"remove its line in {CHECKSUMS}"
            )


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
