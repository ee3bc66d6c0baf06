"""Loading through the stock Auto classes.

transformers lets a package register a "quantizer", which may change a model before its weights load. Ours attaches the
feature maps that ``quantization_config`` in config.json lists, so that after ``import dofla`` a converted model's
folder loads with ``AutoModelForCausalLM.from_pretrained`` into the stock class. Ours quantizes
nothing; weights that are quantized as well keep their quantizer, to which it passes on what concerns them.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers import AutoHfQuantizer, HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from dofla.errors import DoflaError
from dofla.integration.attaching import attach, renamed, switch_on
from dofla.integration.checksums import CHECKSUMS, check_checksums
from dofla.integration.offload import keep_in_memory
from dofla.integration.record import Record
from dofla.layers import check_constants
from dofla.plans.plan import Plan

METHOD = "dofla"
_OF_WEIGHTS: tuple[str, ...] = ("update_dtype", "update_device_map", "update_attn_implementation", "get_new_dtype")
_OF_WEIGHTS += ("validate_environment", "adjust_max_memory", "param_element_size", "update_parallel_plan")
_OF_WEIGHTS += ("get_weight_conversions", "update_weight_conversions", "_convert_model_for_quantization")
"""Methods that are those of the quantizer of the weights, where there is one and has them."""
KEEP_ADAPTER = (
    "dofla.save_adapter keeps what was measured or trained, dofla.load(adapter, quantization_config=...) opens it again"
)
given_weights: ContextVar[dict[str, Tensor] | None] = ContextVar("dofla_given_weights", default=None)
"""The ``state_dict`` that ``save_pretrained`` was given, for which transformers takes what the quantizer says."""


@register_quantization_config(METHOD)
class DoflaConfig(QuantizationConfigMixin):
    """A plan, and the record that goes with it, as the ``quantization_config`` of a model's config.

    ``of_weights`` is what quantized the weights of a model that was converted afterwards, whose place this has taken; a
    model's body has the same config, and so knows it too. Its own config is the field ``weights`` of files.
    """

    saving = False  # True while the model is being written: its file then says that checksums are to follow

    def __init__(self, quant_method: str = METHOD, record: Any = None, weights: Any = None, **plan: Any) -> None:
        self.quant_method = quant_method  # type: ignore[assignment] # registered: no member of their enumeration
        self.record = Record.from_dict(record or {}, "quantization_config: record")
        self.plan = Plan.from_dict(plan, "quantization_config")
        self.of_weights = None if weights is None else _quantizer_of(weights)

    def get(self, name: str, default: Any = None) -> Any:
        """A field, as of a dictionary: for that transformers takes what is in a config that it is handed."""
        return self.to_dict().get(name, default)

    def to_dict(self) -> dict[str, Any]:
        fields = {"quant_method": self.quant_method, **self.plan.to_dict()}
        if record := self.record.to_dict():
            fields["record"] = record
        if self.of_weights is not None:
            fields["weights"] = self.of_weights.quantization_config.to_dict()
        if self.saving:
            fields[CHECKSUMS] = {}
        return fields


def _quantizer_of(weights: Any) -> HfQuantizer:
    """The quantizer that a config's ``weights`` are of; DoflaError if they name none that transformers has."""
    try:
        return AutoHfQuantizer.from_config(weights)
    except (AttributeError, TypeError, ValueError) as error:
        what = "is no quantization of weights that transformers knows: take the folder as save_pretrained wrote it"
        raise DoflaError(f"quantization_config: weights is {weights!r}, which {what} ({error})") from error


@register_quantizer(METHOD)
class DoflaQuantizer(HfQuantizer):
    """Attaches feature maps while a checkpoint loads."""

    quantization_config: DoflaConfig
    is_compileable = is_trainable = True

    def __init__(self, quantization_config: DoflaConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        if (of_weights := quantization_config.of_weights) is not None:
            vars(self).update({name: getattr(of_weights, name) for name in _OF_WEIGHTS if hasattr(of_weights, name)})

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if (of_weights := self.quantization_config.of_weights) is not None:
            of_weights._process_model_before_weight_loading(model, **kwargs)
        if files := kwargs.get("checkpoint_files"):
            check_checksums(files)
        self.quantization_config.plan = renamed(self.quantization_config.plan, model)
        self._attached = attach(model, self.quantization_config.plan)
        model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), METHOD}
        state = model.state_dict(keep_vars=True)
        self._shapes = {name: tensor.shape for name, tensor in state.items() if f".{METHOD}." in name}

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        # Ours alone, as transformers looks at the others; buffers included: a fixed projection is as much part of a map
        # as a trained one.
        state = model.state_dict(keep_vars=True)
        for name, shape in self._shapes.items():
            tensor = state[name]
            if not (tensor.is_meta or getattr(tensor, "_is_hf_initialized", False)):
                raise DoflaError(f"the checkpoint does not fit its plan: {name} is missing")
            if tensor.shape != shape:
                raise DoflaError(
                    f"the checkpoint does not fit its plan: {name} is {list(tensor.shape)}, not {list(shape)}"
                )
        try:
            for layer in self._attached:
                keep_in_memory(layer)
        except KeyError as error:
            raise DoflaError(f"the checkpoint does not fit its plan: {error.args[0]} is missing") from error
        check_constants(model, "the checkpoint")
        switch_on(model)
        if (of_weights := self.quantization_config.of_weights) is not None:
            return of_weights._process_model_after_weight_loading(model, **kwargs)
        # transformers forbids .half() and .to(dtype) on quantized models; this one is none.
        model.is_quantized = False  # type: ignore[assignment] # to torch, an attribute is a module
        model.config._is_quantized = False

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """True of our own parameters: transformers then leaves it to us to look at their shapes, and to say so."""
        of_weights = self.quantization_config.of_weights
        needed = of_weights is not None and of_weights.param_needs_quantization(model, param_name)
        return needed or f".{METHOD}." in param_name

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        of_weights, given = self.quantization_config.of_weights, given_weights.get()
        try:
            return (given, {}) if of_weights is None else of_weights.get_state_dict_and_metadata(model)
        except ValueError as error:  # of torchao, which knows no file for some of its tensors
            raise DoflaError(f"the weights cannot be saved ({error}): {KEEP_ADAPTER}") from error

    def _dequantize(self, model: PreTrainedModel, dtype: Any = None) -> PreTrainedModel:
        raise DoflaError(
            "a converted model has no weights that dofla has quantized: dofla.restore gives the original back"
        )

    def is_serializable(self) -> bool:
        return True
