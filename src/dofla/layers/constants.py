"""The constants that a file has for layers, checked before kernels rely on them."""

from torch import nn

from dofla.attention import KeySmoothing
from dofla.attention.coding import Coder
from dofla.errors import DoflaError
from dofla.layers.predictor import ImportancePredictor


def check_constants(model: nn.Module, where: str) -> None:
    """DoflaError naming ``where``, a file or a folder, if it holds what no coder, smoothing or predictor can have."""
    for name, module in model.named_modules():
        if isinstance(module, (Coder, KeySmoothing, ImportancePredictor)) and (fault := _fault(module)):
            raise DoflaError(f"{where} is damaged ({name}: {fault}): make it again, or fetch it again")


def _fault(module: Coder | KeySmoothing | ImportancePredictor) -> str | None:
    if isinstance(module, Coder):
        return module.fault()
    bad = (name for name, constant in module.named_buffers() if not constant.isfinite().all())
    return next((f"{name} holds NaN or infinity" for name in bad), None)
