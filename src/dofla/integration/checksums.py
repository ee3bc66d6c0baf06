"""Checksums of a whole model, in its config.json: what is opened is what was saved, by whichever library."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers.utils import CONFIG_NAME

from dofla.errors import DoflaError
from dofla.storage.files import read_json, write_json

CHECKSUMS = "checksums"
"""The field of ``quantization_config`` that holds them, by file. It is empty while the files are written, so that none
are opened of which only some are new."""
_PIECE = 2**24


def write_checksums(folder: Path) -> None:
    """Put the checksums of config and weights, just written, into the config; nothing if they are there already."""
    config = read_json(folder / CONFIG_NAME, "a config")
    if _found(config) != {}:
        return
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")])
    if files:
        config = with_checksums(config, {path.name: checksum(path) for path in files})
    else:  # a distributed checkpoint, which other processes write
        del config["quantization_config"][CHECKSUMS]
    write_json(folder / CONFIG_NAME, config)


def with_checksums(config: Mapping[str, Any], of_files: Mapping[str, str]) -> dict[str, Any]:
    """A config with the checksums of its weights, and its own."""
    checksums = {**of_files, CONFIG_NAME: _of_config(config)}
    return {**config, "quantization_config": {**config["quantization_config"], CHECKSUMS: checksums}}


def checksums_of(path: Path, config: Mapping[str, Any]) -> dict[str, str] | None:
    """The checksums that a config holds, if it does; DoflaError naming its ``path`` if its own is not among them."""
    checksums = _found(config)
    if checksums is None:
        return None
    if not isinstance(checksums, dict) or checksums.get(CONFIG_NAME) != _of_config(config):
        raise _changed(path)
    return checksums


def check_checksums(files: Sequence[str | Path]) -> None:
    """See that the files of weights, and the config beside them, are what they were when they were saved, if that
    config holds checksums; DoflaError naming the first that is not. Weights are read once more, by all cores at once.
    """
    path = Path(files[0]).with_name(CONFIG_NAME)
    checksums = checksums_of(path, read_json(path, "a config")) if path.exists() else None
    if checksums is None:
        return
    indices = [file for file in path.parent.glob("*.index.json") if file.name in checksums]
    for file in [*indices, *map(Path, files)]:
        if checksums.get(file.name) != checksum(file):
            raise _changed(file)


def checksum(path: Path) -> str:
    """The SHA-256, in hexadecimal digits, of the SHA-256 of each 16 MiB of a file, which all cores take together."""

    def of_piece(start: int) -> bytes:
        with open(path, "rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(_PIECE)).digest()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return hashlib.sha256(b"".join(pool.map(of_piece, range(0, path.stat().st_size, _PIECE)))).hexdigest()


def _found(config: Mapping[str, Any]) -> Any:
    ours = config.get("quantization_config")
    return ours.get(CHECKSUMS) if isinstance(ours, dict) else None


def _of_config(config: Mapping[str, Any]) -> str:
    """The checksum of what a config says, but for its checksums."""
    ours = {name: value for name, value in config["quantization_config"].items() if name != CHECKSUMS}
    return hashlib.sha256(json.dumps({**config, "quantization_config": ours}, sort_keys=True).encode()).hexdigest()


def _changed(path: Path) -> DoflaError:
    return DoflaError(
        f"{path} is damaged, edited or not written to its end (its checksum does not fit): copy or save it again; or, "
        f"to keep it so, remove {CHECKSUMS} from quantization_config in {CONFIG_NAME}"
    )
