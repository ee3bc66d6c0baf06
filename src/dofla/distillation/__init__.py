"""Training the feature maps against the softmax attention they replace, and whole students towards their teacher.

Also what the losses tell without training: how close each layer is, the error curves that plans are made from, and how
layers share the bytes of a compressed cache.
Knows students and windows, and no recipe.
"""

from dofla.distillation.calibrate import calibrate
from dofla.distillation.descent import SCHEDULES
from dofla.distillation.direct import DIRECT
from dofla.distillation.end_to_end import distill_end_to_end
from dofla.distillation.history import History
from dofla.distillation.loop import distill
from dofla.distillation.losses import LOSSES
from dofla.distillation.tracking import tracked
from dofla.distillation.training_free import compress, measure_head_budgets
from dofla.distillation.trials import measure_curves

__all__ = [
    "DIRECT",
    "LOSSES",
    "SCHEDULES",
    "History",
    "calibrate",
    "compress",
    "distill",
    "distill_end_to_end",
    "measure_curves",
    "measure_head_budgets",
    "tracked",
]
