"""Saving and opening students: the feature maps alone, or everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from dofla.errors import DoflaError
from dofla.files import new_folder, read_json, write_json
from dofla.integration.surgery import is_linearized, linear_layers, linearize, plan_of, restore
from dofla.plan import Plan

ADAPTER, WEIGHTS = "dofla_adapter.json", "feature_maps.safetensors"


def feature_map_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """All parameters of the feature maps, ``<module name>.<parameter name>`` → CPU tensor."""
    return {
        f"{name}.{key}": tensor.detach().cpu().contiguous()
        for name, layer in linear_layers(model).items()
        for key, tensor in layer.state_dict().items()
    }


def load_feature_map_tensors(model: PreTrainedModel, tensors: dict[str, Tensor], where: str) -> None:
    """The reverse of :func:`feature_map_tensors`; DoflaError naming ``where`` unless names and shapes all fit."""
    own = feature_map_tensors(model)
    if own.keys() != tensors.keys():
        odd = sorted(own.keys() ^ tensors.keys())[0]
        raise DoflaError(f"{where} does not fit its plan: {odd} is on one side only")
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            shapes = f"{list(tensor.shape)}, not {list(own[name].shape)}"
            raise DoflaError(f"{where} does not fit its plan: {name} is {shapes}")
    for name, layer in linear_layers(model).items():
        layer.load_state_dict({key: tensors[f"{name}.{key}"] for key in layer.state_dict()})


def save_adapter(model: PreTrainedModel, folder: str | Path) -> Path:
    """Write only the feature maps and the plan, with a pointer to the base model.

    Args:
        model: a linearised model.
        folder: a new folder.

    Raises:
        DoflaError: if the model is not linearised or the folder exists.
    """
    with new_folder(folder) as out:
        write_adapter(model, out)
    return Path(folder)


def write_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write the adapter's files into an existing folder."""
    save_file(feature_map_tensors(model), folder / WEIGHTS)
    plan_of(model).save(folder / "plan.json")
    base = model.config._name_or_path
    base = str(Path(base).resolve()) if base and Path(base).exists() else base
    write_json(folder / ADAPTER, {"format": 1, "base_model": base, "class": type(model).__name__})


def load(path: str | Path, *, trust_remote_code: bool = False, **kwargs: Any) -> PreTrainedModel:
    """Open a student: an adapter folder, or a standalone checkpoint.

    Args:
        path: folder written by :func:`save_adapter` or by ``save_pretrained``.
        trust_remote_code: allow the base model's repository to bring its own code.
        **kwargs: for ``from_pretrained`` (``dtype``, ``device_map``, ...).

    Raises:
        DoflaError: if the folder holds neither, or what it holds is damaged.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise DoflaError(f"{folder} is not a folder: pass one written by save_adapter or save_pretrained")
    if not (folder / ADAPTER).exists():
        model = load_model(folder, trust_remote_code=trust_remote_code, **kwargs)
        if not is_linearized(model):
            raise DoflaError(f"{folder} is neither an adapter nor a linearised checkpoint: it is a plain model")
        return model
    adapter = read_json(folder / ADAPTER, "a dofla adapter")
    plan = Plan.load(folder / "plan.json")
    tensors = read_tensors(folder / WEIGHTS)
    base = adapter.get("base_model")
    if not (base and isinstance(base, str)):
        raise DoflaError(f"{folder / ADAPTER} names no base model: set 'base_model' to its path or name")
    model = load_model(base, adapter.get("class"), trust_remote_code=trust_remote_code, **kwargs)
    # The base of a student that was opened from a standalone checkpoint is that checkpoint.
    linearize(restore(model) if is_linearized(model) else model, plan)
    load_feature_map_tensors(model, tensors, str(folder / WEIGHTS))
    return model


def load_model(
    name: str | Path, class_name: str | None = None, *, trust_remote_code: bool = False, **kwargs: Any
) -> PreTrainedModel:
    """A model from a folder or the hub, in the class its config names; in eval mode.

    Raises:
        DoflaError: no such model, or a checkpoint that does not load.
    """
    # Without the safetensors flag transformers would fall back to pickled weights.
    kwargs = {"use_safetensors": True, **kwargs}
    # Tensors of another shape are let pass and named below; transformers says no more than that there are some.
    resize = kwargs.pop("ignore_mismatched_sizes", False)
    options = {"trust_remote_code": trust_remote_code, "ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        wanted = class_name or (config.architectures or [None])[0]
        auto = getattr(transformers, str(wanted), None)
        if not (isinstance(auto, type) and issubclass(auto, PreTrainedModel)):
            auto = transformers.AutoModel
        if trust_remote_code and getattr(config, "auto_map", None):
            auto = transformers.AutoModelForCausalLM
        model, loaded = auto.from_pretrained(name, **options, **kwargs)
    except DoflaError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DoflaError(f"cannot load model {str(name)!r}: {first_line}") from error
    if loaded["mismatched_keys"] and not resize:
        key, found, expected = min(loaded["mismatched_keys"])
        raise DoflaError(f"cannot load model {str(name)!r}: {key} is {list(found)}, not {list(expected)}")
    return model.eval()


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """A safetensors file; DoflaError naming it if it is missing, damaged or not finite."""
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise DoflaError(f"{path} does not exist: the checkpoint is incomplete") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise DoflaError(f"{path} is damaged ({error}): copy or make it again") from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise DoflaError(f"{path} is damaged: {name} holds NaN or infinity")
    return tensors
