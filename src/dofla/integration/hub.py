"""Requests to the Hugging Face hub, all of them through huggingface_hub."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, snapshot_download
from huggingface_hub.constants import REPO_ID_SEPARATOR
from huggingface_hub.errors import HFValidationError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from dofla.errors import DoflaError, first_line
from dofla.integration.model_card import README, by_hand

_PATIENCE = 3
"""Seconds; a card may go without a license."""
_LICENCE = ("license", "license_name", "license_link")
_ACCESS = ("revision", "token", "cache_dir", "local_files_only")
_UNREACHABLE = (OfflineModeIsEnabled, HTTPError, OSError)


def hub_name(name: str) -> str:
    """``name`` if it can be that of a repository of the hub and is no folder here; otherwise nothing."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return ""
    return "" if Path(name).exists() else name


def origin(place: str) -> str:
    """The repository's name, if ``place`` is one, or a folder of the hub's cache; otherwise nothing."""
    snapshot = Path(place)
    kind, _, name = snapshot.parent.parent.name.partition(REPO_ID_SEPARATOR)
    if snapshot.parent.name == "snapshots" and kind == "models":
        return name.replace(REPO_ID_SEPARATOR, "/")
    return hub_name(place)


def license_of(model: str) -> dict[str, str]:
    """``license`` of a model's card, or of its config, with ``license_name`` and ``license_link`` if they are there. A
    model is a folder, or a name on the hub, which is asked for a few seconds."""
    folder, found = Path(model), dict[str, Any]()
    try:
        if folder.is_dir():
            with suppress(OSError, ValueError, TypeError, yaml.YAMLError):  # a card that is missing or damaged
                found = ModelCard.load(folder / README, ignore_metadata_errors=True).data.to_dict()
            if not found.get("license"):
                found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        else:
            card = HfApi().model_info(model, timeout=_PATIENCE).card_data
            found = {} if card is None else card.to_dict()
    except (*_UNREACHABLE, HFValidationError, ValueError):
        return {}
    known = {key: found[key] for key in _LICENCE if isinstance(found.get(key), str)}
    return known if "license" in known else {}


def access_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``from_pretrained`` among these that say how a repository is read."""
    return {name: options[name] for name in _ACCESS if name in options}


def fetch(name: str, files: list[str], **options: Any) -> Path:
    """The folder of the cache that holds those ``files`` of a repository that it has, with the options of
    :func:`access_of`; from the cache if offline. DoflaError if it is no name of the hub, or there is no such
    repository, or none can be reached."""
    if not hub_name(name):
        raise DoflaError(f"{name} is not a folder: pass one written by save_adapter or save_pretrained, or a hub name")
    try:
        return Path(snapshot_download(name, allow_patterns=files, **options))
    except _UNREACHABLE as error:
        raise DoflaError(f"{name} is not a folder, and the hub does not give it: {first_line(error)}") from error


def upload(api: HfApi, folder: Path, name: str, optional: list[str], *, revision: str | None, **options: Any) -> str:
    """Put a folder into a repository, in one commit with these ``options`` of ``create_commit``; its address. Not a
    README.md where a person wrote another. Files that are ``optional``, and not in the folder, do not stay."""
    files = {path.name: path for path in sorted(folder.iterdir())}
    if has_own_card(api, name):
        files.pop(README, None)
    stale = [file for file in optional if file not in files and api.file_exists(name, file, revision=revision)]
    operations: list[CommitOperationAdd | CommitOperationDelete] = []
    operations += [CommitOperationAdd(file, path) for file, path in files.items()]
    operations += [CommitOperationDelete(file) for file in stale]
    return api.create_commit(name, operations, revision=revision, **options)


def has_own_card(api: HfApi, name: str) -> bool:
    """True if the repository has a README.md that was written or changed by hand."""
    return api.file_exists(name, README) and by_hand(Path(api.hf_hub_download(name, README)))
