"""A run's folder and its records: what it is of, and the machine."""

import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

import dofla
from dofla.errors import DoflaError
from dofla.runs.recipe import read_yaml
from dofla.storage.fields import known_prefill
from dofla.storage.files import replacing, write_json
from dofla.storage.rank import is_main_process

_MACHINE = "run.json"


def claim(folder: str | Path, name: str, data: dict[str, Any]) -> None:
    """Give ``folder``, which is locked, ``data`` as its file ``name``, or see that it holds the same; DoflaError if it
    holds something else."""
    folder = Path(folder)
    if (folder / name).exists():
        if _essence(read_yaml(folder / name)) != _essence(data):
            raise DoflaError(f"{folder} exists already, with another recipe: choose another folder or remove it")
        return
    if not is_main_process():  # who writes it
        return
    folder.mkdir(parents=True, exist_ok=True)
    if any(path.name != _MACHINE and not path.name.startswith(".") for path in folder.iterdir()):
        raise DoflaError(f"{folder} exists already, and is no run's: choose another folder or remove it")
    write_json(folder / _MACHINE, machine())
    with replacing(folder / name) as partial:
        partial.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")


def _essence(recipe: dict[str, Any]) -> dict[str, Any]:
    """All of a recipe but where it is computed and recorded; nor what is not given, which versions before may not have
    known."""
    own = {key: value for key, value in recipe.items() if key not in ("track", "device")}
    return _given(own | {"prefill": known_prefill(own.get("prefill"))})


def _given(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _given(value) for key, value in data.items() if value is not None}
    return [_given(value) for value in data] if isinstance(data, list) else data


def machine() -> dict[str, Any]:
    """Versions and hardware, for the record."""
    return {
        "dofla": dofla.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": _processor(),
        "cpu_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _processor() -> str:
    """Its name, which Python does not know on Linux."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
