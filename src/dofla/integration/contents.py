"""The contents of a folder that is named as a model: an original, or what cannot be taken for one."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import CONFIG_NAME

from dofla.errors import DoflaError
from dofla.integration.hub import hub_name
from dofla.integration.quantizer import METHOD

ADAPTER = "dofla_adapter.json"
_PEFT = "adapter_config.json"


class AdapterConfig(PreTrainedConfig):
    """The config of an adapter, which describes no model: asked for one, transformers says what the folder is."""

    model_type = "dofla_adapter"

    @property
    def auto_map(self) -> Any:
        """Asked of a config first by the auto classes of models, and by no others."""
        check_model(self._name_or_path)
        raise DoflaError(f"{self._name_or_path} is an adapter: dofla.load opens it")


AutoConfig.register(AdapterConfig.model_type, AdapterConfig)


def check_original(place: str) -> None:
    """DoflaError unless ``place`` holds a model, by :func:`check_model`, that is not converted: it names the base."""
    check_model(place)
    if Path(place).is_dir():
        check_unconverted(_read(Path(place) / CONFIG_NAME).get("quantization_config"), place)


def check_model(place: str) -> None:
    """DoflaError unless ``place`` is a folder that holds a model, or could be the name of one on the hub: it says what
    there is instead, and what opens or makes it."""
    path = Path(place)
    if path.suffix == ".gguf" or (path.is_dir() and not (path / CONFIG_NAME).exists() and any(path.glob("*.gguf"))):
        raise DoflaError(
            f"{place} holds a GGUF file: open it with AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME) in "
            "Python, save it with save_pretrained, and give that folder"
        )
    if path.is_file():
        raise DoflaError(f"{place} is a file: give the folder of a model")
    if not path.is_dir():
        if not hub_name(place):
            raise DoflaError(f"{place!r} is no folder, and no name that the hub could have: give one of these")
        return
    if (path / ADAPTER).exists():
        base = _read(path / ADAPTER).get("base_model") or "its base model"
        raise DoflaError(f"{place} is an adapter of {base}: dofla.load opens it; to compress anew, give {base}")
    if not (path / CONFIG_NAME).exists():
        if (path / _PEFT).exists():
            base = _read(path / _PEFT).get("base_model_name_or_path") or "its base model"
            raise DoflaError(
                f"{place} is an adapter of peft for {base}: merge it (merge_and_unload), save the model with "
                "save_pretrained, and give that folder"
            )
        raise DoflaError(f"the folder {place} has no {CONFIG_NAME}: give that of a model")


def check_unconverted(method: Any, what: str) -> None:
    """DoflaError if a config's ``quantization_config`` is that of a converted model; it names its base."""
    fields = method if isinstance(method, dict) else vars(method) if method is not None else {}
    if fields.get("quant_method") == METHOD:
        record = fields.get("record") or {}
        base = (record.get("base_model") if isinstance(record, dict) else record.base_model) or "its base model"
        raise DoflaError(f"{what} is compressed or linearized already: give {base}")


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty if it is none, which whatever opens it says."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
