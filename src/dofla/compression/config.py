"""Compressing a model while ``from_pretrained`` opens it.

    AutoModelForCausalLM.from_pretrained(name, quantization_config=dofla.CacheConfig(size="3MiB"))

transformers lets a package register a "quantizer", which may change a model once its weights are loaded. Ours
compresses the model's KV cache; no weight is quantized.
"""

from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from dofla.compression.calibration import Calibration
from dofla.compression.compress import compress
from dofla.compression.directions import default_cut
from dofla.compression.plan import BITS
from dofla.compression.retrieval import AUTO
from dofla.compression.target import tokenizer_of
from dofla.integration.positions import positions_of
from dofla.integration.self_samples import token_windows

METHOD = "dofla_cache"
_CALIBRATING = ("calibration", "data", "tokenizer")


@register_quantization_config(METHOD)
@dataclass(eq=False, repr=False)
class CacheConfig(QuantizationConfigMixin):
    """The compression of the KV cache of the model that ``from_pretrained(..., quantization_config=...)`` opens.

    Args:
        size, ratio, context, head_budgets, retrieval_heads, evict, bits, keep_softmax, prefill: as for
            :func:`dofla.compress`.
        calibration: what :func:`dofla.calibrate` measured of this model, the file it was saved to, or ``base``. Without
            one, and without ``data``, it is found as :func:`dofla.compress` says; or else the model is calibrated when
            it is opened, on the device it is opened on.
        data: text to calibrate on, as for :func:`dofla.token_windows`.
        tokenizer: of the model, default the one beside its weights.
    """

    quant_method: Any = field(default=METHOD, init=False)  # registered: no member of their enumeration
    size: str | int | None = None
    _: KW_ONLY
    ratio: float | None = None
    calibration: Calibration | str | Path | None = None
    data: str | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    context: int | None = None
    head_budgets: str = "measured"
    retrieval_heads: int | str = AUTO
    evict: bool = True
    bits: float = BITS
    keep_softmax: Collection[str] = ()
    prefill: str = "exact"

    @property
    def options(self) -> dict[str, Any]:
        """Options of :func:`dofla.compress` but for what it calibrates by."""
        return {name: value for name, value in vars(self).items() if name not in ("quant_method", *_CALIBRATING)}

    def to_dict(self) -> dict[str, Any]:
        given = {name: value for name, value in {"data": self.data, **self.options}.items() if value not in (None, ())}
        return {"quant_method": self.quant_method, **given}

    def compress(self, model: PreTrainedModel) -> PreTrainedModel:
        """Compress an open model, in place."""
        windows, tokenizer = None, self.tokenizer
        if self.data is not None:
            tokenizer = tokenizer or tokenizer_of(model)
            assert tokenizer is not None
            windows = token_windows(self.data, tokenizer, model=model, **default_cut(positions_of(model), self.context))
        return compress(model, windows, calibration=self.calibration, tokenizer=tokenizer, **self.options)


@register_quantizer(METHOD)
class CacheQuantizer(HfQuantizer):
    """Compresses a model's cache once its weights are loaded."""

    quantization_config: CacheConfig
    is_trainable = True

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        self.remove_quantization_config(model)  # the model's weights are none that this has quantized
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.config._is_quantized = False
        self.quantization_config.compress(model)

    def is_serializable(self) -> bool:
        return True
