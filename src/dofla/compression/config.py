"""Compressing a model while ``from_pretrained`` opens it.

    AutoModelForCausalLM.from_pretrained(name, quantization_config=dofla.CacheConfig(size="3MiB"))

transformers lets a package register a "quantizer", which may change a model once its weights are loaded. Ours
compresses the model's KV cache; no weight is quantized.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from dofla.compression.calibration import Calibration
from dofla.compression.compress import compress
from dofla.errors import DoflaError
from dofla.integration.self_samples import token_windows

METHOD = "dofla_cache"
WINDOWS, LENGTH = 12, 512


@register_quantization_config(METHOD)
class CacheConfig(QuantizationConfigMixin):
    """The compression of the KV cache of the model that ``from_pretrained(..., quantization_config=...)`` opens.

    Args:
        size, ratio, context, head_budgets, retrieval_heads, keep_softmax, prefill: as for :func:`dofla.compress`.
        calibration: what :func:`dofla.calibrate` measured of this model, or the file it was saved to. Without one the
            model is calibrated when it is opened, on the device it is opened on.
        data: text to calibrate on, as for :func:`dofla.token_windows`; default samples of the model itself.
        tokenizer: of the model, default the one beside its weights.
    """

    def __init__(
        self,
        size: str | int | None = None,
        *,
        ratio: float | None = None,
        calibration: Calibration | str | Path | None = None,
        data: str = "self",
        tokenizer: PreTrainedTokenizerBase | None = None,
        context: int | None = None,
        head_budgets: str = "measured",
        retrieval_heads: int = 0,
        keep_softmax: Collection[str] = (),
        prefill: str = "auto",
    ) -> None:
        self.quant_method = METHOD  # type: ignore[assignment] # registered: no member of their enumeration
        self.calibration, self.data, self.tokenizer = calibration, data, tokenizer
        self.options: dict[str, Any] = {
            "size": size,
            "ratio": ratio,
            "context": context,
            "head_budgets": head_budgets,
            "retrieval_heads": retrieval_heads,
            "keep_softmax": keep_softmax,
            "prefill": prefill,
        }

    def to_dict(self) -> dict[str, Any]:
        given = {name: value for name, value in self.options.items() if value}
        return {"quant_method": self.quant_method, "data": self.data, **given}

    def compress(self, model: PreTrainedModel) -> PreTrainedModel:
        """Compress an open model, in place."""
        windows, tokenizer = None, self.tokenizer
        if self.calibration is None:
            try:
                tokenizer = tokenizer or AutoTokenizer.from_pretrained(model.name_or_path)
            except (OSError, ValueError) as error:
                raise DoflaError(
                    f"{model.name_or_path} has no tokenizer to calibrate with: give CacheConfig a tokenizer or a "
                    "calibration"
                ) from error
            windows = token_windows(self.data, tokenizer, length=LENGTH, windows=WINDOWS, model=model)
        return compress(model, windows, calibration=self.calibration, tokenizer=tokenizer, **self.options)


@register_quantizer(METHOD)
class CacheQuantizer(HfQuantizer):
    """Compresses a model's cache once its weights are loaded."""

    quantization_config: CacheConfig

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        self.remove_quantization_config(model)  # the model's weights are none that this has quantized
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.config._is_quantized = False
        self.quantization_config.compress(model)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True
