"""``save_pretrained`` and ``push_to_hub`` of converted models: transformers' own, with a model card and checksums.

transformers has no hook that knows the folder, and on a push puts an empty card over the one in it. So two methods of
``PreTrainedModel`` are wrapped: for a converted model they see to README.md and checksums before and after the method,
which does its work as ever; for any other model there is nothing but the method. (Attributes of each converted model
would be less far-reaching, but make a circle of references: a deleted model would keep its memory until the garbage
collector comes by.)
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME

from dofla.errors import DoflaError
from dofla.integration.checksums import write_checksums
from dofla.integration.hub import has_own_card, license_of
from dofla.integration.model_card import README, by_hand, write_card
from dofla.integration.quantizer import KEEP_ADAPTER, DoflaConfig, given_weights
from dofla.integration.record import Record
from dofla.storage.files import replacing

_SAVED = "torchao"
"""The method of quantized weights that are saved. bitsandbytes packs weights anew once a CPU has used them, and then
saves what it cannot open."""
_own_card: ContextVar[bytes | None] = ContextVar("dofla_own_card", default=None)
"""The README.md that a person has put into the folder being saved to."""


def completed_record(model: PreTrainedModel) -> Record:
    """The model's record, with what can be read off the model and its base."""
    record = model.config.quantization_config.record
    record.model_class, record.dtype = type(model).__name__, str(model.dtype).removeprefix("torch.")
    for place in (model.config._name_or_path, record.base_model):
        if place and not record.license:
            record.license = license_of(place)
    return record


def _with_card(save: Callable) -> Callable:
    """``save_pretrained`` of the weights it is given; and checksums, and README.md unless a person has written it."""

    @wraps(save)
    def save_pretrained(self, save_directory, is_main_process=True, state_dict=None, *args, **kwargs) -> None:
        if not _is_student(self):
            return save(self, save_directory, is_main_process, state_dict, *args, **kwargs)
        config = self.config.quantization_config
        if (quantizer := config.of_weights) is not None:
            method, what = quantizer.quantization_config.quant_method, type(self).__name__
            if (method := getattr(method, "value", method)) != _SAVED or not hasattr(self, "hf_quantizer"):
                raise DoflaError(f"the weights are quantized ({method}), which a {what} cannot save: {KEEP_ADAPTER}")
            if quantizer.pre_quantized:  # transformers cannot reverse how it has read these
                kwargs.setdefault("save_original_format", False)
        completed_record(self)  # it goes into config.json
        card = Path(save_directory) / README
        own = card.read_bytes() if by_hand(card) else None
        tokens = _own_card.set(own), given_weights.set(state_dict)
        config.saving = True
        try:
            save(self, save_directory, is_main_process, state_dict, *args, **kwargs)
        finally:
            config.saving = False
            _own_card.reset(tokens[0])
            given_weights.reset(tokens[1])
        if is_main_process and (card.parent / CONFIG_NAME).exists():
            write_checksums(card.parent)
            if own is None:
                _write(self, card.parent)
            elif card.read_bytes() != own:  # a push has put the repository's there
                _put(card, own)
        return None

    return save_pretrained


def _with_card_in_place(upload: Callable) -> Callable:
    """``_upload_modified_files``, before which transformers has put the repository's card into the folder, or an empty
    one if it has none."""

    @wraps(upload)
    def _upload_modified_files(self, working_dir, repo_id, *args, **kwargs) -> Any:
        card, own = Path(working_dir) / README, _own_card.get()
        if _is_student(self):
            write_checksums(card.parent)
        if _is_student(self) and own is not None:
            _put(card, own)
        elif _is_student(self) and not has_own_card(HfApi(token=kwargs.get("token")), repo_id):
            tags = ModelCard.load(card, ignore_metadata_errors=True).data.tags or ()
            card.unlink()
            _write(self, card.parent, name=repo_id, tags=tags)
        return upload(self, working_dir, repo_id, *args, **kwargs)

    return _upload_modified_files


PreTrainedModel.save_pretrained = _with_card(PreTrainedModel.save_pretrained)  # type: ignore[method-assign]
PreTrainedModel._upload_modified_files = _with_card_in_place(  # type: ignore[method-assign]
    PreTrainedModel._upload_modified_files
)


def _is_student(model: PreTrainedModel) -> bool:
    return isinstance(getattr(model.config, "quantization_config", None), DoflaConfig)


def _write(model: PreTrainedModel, folder: Path, **options: Any) -> None:
    config = model.config.quantization_config
    write_card(folder, config.plan, config.record, adapter=False, **options)


def _put(path: Path, content: bytes) -> None:
    with replacing(path) as partial:
        partial.write_bytes(content)
