"""Saving and opening converted models: an adapter alone, or everything."""

import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import CONFIG_NAME
from transformers.utils.quantization_config import QuantizationConfigMixin

from dofla.errors import DoflaError, about, first_line
from dofla.integration.contents import ADAPTER, AdapterConfig, check_model
from dofla.integration.converted import Converted, is_converted
from dofla.integration.hub import access_of, fetch, hub_name
from dofla.integration.lora import factor_pairs, merge_factors
from dofla.integration.model_card import write_card
from dofla.integration.offload import check_in_memory, device_of
from dofla.integration.packages import DEMO, packaged_name, packaged_path
from dofla.integration.precision import warn_of_slow_products
from dofla.integration.quantizer import METHOD
from dofla.integration.record import RECORD, Record
from dofla.integration.room import warn_of_memory
from dofla.integration.saving import completed_record
from dofla.integration.surgery import convert, restore
from dofla.integration.trained import is_trained, lora_of
from dofla.layers import check_constants
from dofla.plans.plan import Plan
from dofla.storage.files import new_folder, read_json, sha256, write_json
from dofla.storage.rank import is_main_process
from dofla.storage.tensors import read_tensors, write_tensors

logger = logging.getLogger(__name__)

WEIGHTS = "dofla.safetensors"
LORA = "lora.safetensors"
_FORMAT = 2
_GIVE_IT = "base_model=FOLDER_OR_NAME (behind --set on the command line) says where it is"
_PLAN = "plan.json"
_FILES = [ADAPTER, WEIGHTS, LORA, _PLAN, RECORD]
_CHECKED = (_PLAN, WEIGHTS, LORA)
"""Files whose SHA-256 the adapter's description holds: weights that a bit has changed in would only answer worse."""


def feature_map_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """All parameters of the feature maps, ``<module name>.<parameter name>`` → CPU tensor."""
    return {
        f"{name}.{key}": tensor.detach().cpu().contiguous()
        for name, layer in Converted.of(model).layers.items()
        for key, tensor in layer.state_dict().items()
    }


def save_adapter(model: PreTrainedModel, folder: str | Path) -> Path:
    """Write only the feature maps and the plan, with a pointer to the base model, a record and a model card; and, of a
    model that was trained end to end, the low-rank factors it has learned.

    Args:
        model: a converted model. Its base model is named as on the hub where that is known: it was opened by that name
            or from the hub's cache, or :func:`dofla.note` was told. Otherwise its folder is named, with a warning
            unless that is in an installed package.
        folder: a new folder, or that of another adapter, which it replaces when everything is written; other files in
            it stay.

    Raises:
        DoflaError: if the model is not converted, or the folder holds something and no adapter.
    """
    folder = Path(folder)
    replaced = (folder / ADAPTER).exists()
    with new_folder(folder, replaced) as out:
        if replaced:
            shutil.copytree(folder, out, dirs_exist_ok=True, ignore=partial(_own_files, folder))
        write_adapter(model, out)
    warn_of_local_base(model, folder)
    return folder


def _own_files(folder: Path, place: str, _: list[str]) -> list[str]:
    """The files of an adapter that stand in its folder, and not in one inside it."""
    return _FILES if Path(place) == folder else []


def write_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write the adapter's files into an existing folder."""
    write_tensors(folder / WEIGHTS, feature_map_tensors(model))
    if lora_of(model):
        write_lora(model, folder)
    write_json(folder / _PLAN, Converted.of(model).plan.to_dict())
    description = {"format": _FORMAT, "base_model": base_of(model), "class": type(model).__name__}
    digests = {name: sha256(folder / name) for name in _CHECKED if (folder / name).exists()}
    write_json(folder / ADAPTER, description | {"sha256": digests})
    write_json(folder / CONFIG_NAME, {"model_type": AdapterConfig.model_type})
    record = completed_record(model)
    record.save(folder / RECORD)
    write_card(folder, Converted.of(model).plan, record, adapter=True)


def base_of(model: PreTrainedModel) -> str:
    """The base model that a converted model's adapter names: a hub name if one is known, otherwise a folder, by the
    package that holds it if there is one."""
    place = model.config._name_or_path
    if not (place and Path(place).exists()):
        return place
    config = Path(place) / "config.json"
    of_folder = read_json(config, "a config").get("quantization_config") if config.exists() else None
    # A standalone model may have weights that its own base has not.
    standalone = of_folder is not None and of_folder.get("quant_method") == METHOD
    known = "" if standalone else Converted.of(model).record.base_model
    return known or packaged_name(place) or str(Path(place).resolve())


def warn_of_local_base(model: PreTrainedModel, adapter: str | Path) -> None:
    """Log a warning if others could not open the model's ``adapter``."""
    base = base_of(model)
    if is_main_process() and not (hub_name(base) or packaged_name(packaged_path(base))):
        logger.warning(
            "others cannot open %s, whose base model is %s: "
            "dofla.note(%r, base_model='owner/name') names it as on the hub",
            *(adapter, f"the folder {base}" if base else "nameless", str(adapter)),
        )


def load(
    path: str | Path, *, base_model: str | Path | None = None, trust_remote_code: bool = False, **kwargs: Any
) -> PreTrainedModel:
    """Open a converted model: an adapter, or a standalone checkpoint.

    Args:
        path: folder written by :func:`save_adapter` or by ``save_pretrained``, or the name of one on the hub; or
            ``demo``, the bundled model, which is not compressed (:func:`dofla.demo`).
        base_model: folder or hub name of an adapter's base model, if it is not where the adapter says.
        trust_remote_code: allow the base model's repository to bring its own code.
        **kwargs: for ``from_pretrained`` (``dtype``; ``device_map`` and ``offload_folder`` for a model larger than
            memory; ``token``; ...). ``revision`` is that of ``path``, not of an adapter's base model.

    Raises:
        DoflaError: if the folder holds neither, or what it holds is damaged; if the hub has none of that name; if an
            adapter's base model is not where it should be.
    """
    model = load_any(path, base_model=base_model, trust_remote_code=trust_remote_code, **kwargs)
    if not is_converted(model) and str(path) != DEMO:
        raise DoflaError(
            f"{path} is neither an adapter nor a converted checkpoint: it is a plain model, which dofla compress "
            "(dofla.compress in Python) compresses"
        )
    return model


def load_any(
    path: str | Path, *, base_model: str | Path | None = None, trust_remote_code: bool = False, **kwargs: Any
) -> PreTrainedModel:
    """Open a converted model, or a model that is none: as :func:`load`, but a plain checkpoint is opened as it is."""
    path = path if Path(path).is_dir() else packaged_path(str(path))
    folder = Path(path) if Path(path).is_dir() else fetch(Path(path).as_posix(), _FILES, **access_of(kwargs))
    if not (folder / ADAPTER).exists():
        return load_model(path, trust_remote_code=trust_remote_code, **kwargs)
    adapter = _description(folder)
    plan = Plan.load(folder / _PLAN)
    base = base_model or adapter.get("base_model")
    if not (base and isinstance(base, (str, Path))):
        raise DoflaError(f"{folder / ADAPTER} names no base model: {_GIVE_IT}")
    try:
        place = packaged_path(str(base))
        kwargs.pop("revision", None)  # the adapter's
        model = load_model(place, class_name=adapter.get("class"), trust_remote_code=trust_remote_code, **kwargs)
    except DoflaError as error:
        raise DoflaError(f"{folder} is the adapter of a base model: {error}; {_GIVE_IT}") from error
    with about(folder / _PLAN):
        # The base of a converted model that was opened from a standalone checkpoint is that checkpoint.
        converted = convert(restore(model) if is_converted(model) else model, plan)
    return _apply(converted, folder)


def _description(folder: Path) -> dict[str, Any]:
    """The description of an adapter; DoflaError naming a file of it that has changed since it was written."""
    adapter = read_json(folder / ADAPTER, "a dofla adapter")
    if adapter.get("format") != _FORMAT:
        raise DoflaError(
            f"{folder / ADAPTER} has format {adapter.get('format')!r}, this version of dofla reads {_FORMAT}: open it "
            "with the version that made it, or compress or distill the model again"
        )
    digests = adapter.get("sha256")
    if not isinstance(digests, dict):
        raise DoflaError(
            f"{folder / ADAPTER} has no sha256: it is damaged, or of an earlier version: compress or distill the model "
            "again"
        )
    for name in _CHECKED:
        path = folder / name
        if (sha256(path) if path.is_file() else None) != digests.get(name):
            raise DoflaError(f"{path} is missing, damaged or edited (its sha256 does not fit): copy or make it again")
    return adapter


def apply_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Give a model, just converted by the adapter's plan, the adapter's feature maps and record, and its weights if it
    has any. DoflaError for a file that is missing, damaged, or does not fit."""
    _description(folder)
    return _apply(Converted.of(model), folder)


def _apply(converted: Converted, folder: Path) -> PreTrainedModel:
    model = converted.model
    where, again = str(folder / WEIGHTS), "; a converted model of an earlier version must be made again"
    tensors, _ = read_tensors(where)
    own = feature_map_tensors(model)
    if odd := sorted(tensors.keys() ^ own.keys()):
        raise DoflaError(f"{where} does not fit its plan: {odd[0]} is on one side only{again}")
    for name, tensor in own.items():
        if tensors[name].shape != tensor.shape:
            found = list(tensors[name].shape)
            raise DoflaError(f"{where} does not fit its plan: {name} is {found}, not {list(tensor.shape)}")
    for name, layer in converted.layers.items():
        layer.load_state_dict({key: tensors[f"{name}.{key}"] for key in layer.state_dict()})
    check_constants(model, where)
    if (folder / LORA).exists():
        merge_lora(model, folder)
    record = Record.load(folder / RECORD)
    record.base_model = record.base_model or converted.record.base_model
    model.config.quantization_config.record = record
    return model


def merge_lora(model: PreTrainedModel, path: str | Path) -> PreTrainedModel:
    """Give a converted model the low-rank updates that end-to-end distillation learned; its feature maps stay.

    Args:
        model: a converted model with its original weights.
        path: the folder ``lora`` of a run of :func:`dofla.linear.distill_end_to_end`, an adapter's, or the file in it.

    Returns:
        ``model`` itself. :func:`dofla.original` still makes it its original, :func:`dofla.restore` the original.

    Raises:
        DoflaError: not converted; weights that were trained already, or are offloaded; a file that is missing,
            damaged, or of another model.
    """
    Converted.of(model)
    refuse_trained(model)
    check_in_memory(model, "adding trained weights")
    path = Path(path)
    path = path / LORA if path.is_dir() else path
    factors, _ = read_tensors(path)
    if not factors:
        raise DoflaError(f"{path} holds no low-rank factors: give the folder lora of an end-to-end run")
    modules = dict(model.named_modules())
    for name, (a, b) in factor_pairs(factors).items():
        if a is None or b is None:
            raise DoflaError(f"{path} does not hold low-rank factors: {name!r} is not one of a pair")
        layer = modules.get(name)
        if not isinstance(layer, (nn.Linear, Conv1D)):
            raise DoflaError(f"{path} is for another model: {type(model).__name__} has no linear layer {name!r}")
        shape = list(layer.weight.T.shape if isinstance(layer, Conv1D) else layer.weight.shape)
        if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1] or [len(b), a.shape[1]] != shape:
            found = f"{list(b.shape)} times {list(a.shape)}"
            raise DoflaError(f"{path} is for another model: {name} is {shape}, its factors are {found}")
    merge_factors(model, factors)
    return model


def write_lora(model: PreTrainedModel, folder: str | Path) -> None:
    """Write the factors merged into the model, for :func:`merge_lora`; the folder is made if need be."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / LORA, lora_of(model))


def refuse_trained(model: PreTrainedModel) -> None:
    """DoflaError if weights of the model were trained already."""
    if is_trained(model):
        raise DoflaError(
            "the model's weights were trained end to end already: dofla.restore(model) gives the original back, "
            "which can be converted and trained anew"
        )


def class_of(config: PreTrainedConfig, class_name: str | None = None, trust_remote_code: bool = False) -> type[Any]:
    """The class of transformers that opens a checkpoint with this config: the one that it names, or that is named over
    it; an auto class where there is none, or where the checkpoint's own code may run."""
    if trust_remote_code and getattr(config, "auto_map", None):
        return transformers.AutoModelForCausalLM
    named = getattr(transformers, str(class_name or next(iter(config.architectures or ()), None)), None)
    return named if isinstance(named, type) and issubclass(named, PreTrainedModel) else transformers.AutoModel


def load_model(
    name: str | Path, *, class_name: str | None = None, trust_remote_code: bool = False, **kwargs: Any
) -> PreTrainedModel:
    """A model from a folder or the hub, in the class its config names; in eval mode.

    Args:
        name: folder, or name on the hub.
        class_name: of the model in transformers, over the config's.
        trust_remote_code: allow the model's repository to bring its own code.
        **kwargs: for ``from_pretrained``.

    Raises:
        DoflaError: no such model, no such class, a ``quantization_config`` for one that has another, or a checkpoint
            that does not load.
    """
    check_model(str(name))
    # Without the safetensors flag transformers would fall back to pickled weights.
    kwargs = {"use_safetensors": True, **kwargs}
    # Tensors of another shape are let pass and named below; transformers says no more than that there are some.
    resize = kwargs.pop("ignore_mismatched_sizes", False)
    options = {"trust_remote_code": trust_remote_code, "ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **access_of(kwargs))
        _check_quantization(config, kwargs.get("quantization_config"))
        auto = class_of(config, class_name, trust_remote_code)
        warn_of_memory(config, getattr(auto, "from_config", auto), kwargs)
        model, loaded = auto.from_pretrained(name, **options, **kwargs)
    except Exception as error:  # a config with a wrong field fails in any way
        raise DoflaError(f"cannot load model {str(name)!r}: {first_line(error)}") from error
    if class_name not in (None, type(model).__name__):
        raise DoflaError(
            f"{name} opens as {type(model).__name__} and is to be a {class_name}, which transformers "
            f"{transformers.__version__} does not have: another version may"
        )
    if loaded["mismatched_keys"] and not resize:
        key, found, expected = min(loaded["mismatched_keys"])
        raise DoflaError(f"cannot load model {str(name)!r}: {key} is {list(found)}, not {list(expected)}")
    warn_of_slow_products(device_of(model), model.dtype)
    return model.eval()


def _check_quantization(config: PreTrainedConfig, given: QuantizationConfigMixin | None) -> None:
    own = getattr(config, "quantization_config", None)
    method = own.get("quant_method") if isinstance(own, dict) else getattr(own, "quant_method", None)
    if given is None or method in (None, given.quant_method):
        return
    what = "compressed" if method == METHOD else f"quantized by {method}"
    raise DoflaError(f"it is {what} already and keeps its weights: quantize the model that it was made from")
