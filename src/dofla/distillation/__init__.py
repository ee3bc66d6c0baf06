"""Training feature maps against the softmax attention they replace, and whole students towards their teacher.

Also what the losses tell without training: how close each layer is, and the error curves that plans are made from.
Knows students and windows, and no recipe.
"""

from dofla.distillation.calibrate import calibrate
from dofla.distillation.end_to_end import distill_end_to_end
from dofla.distillation.gradients import DIRECT
from dofla.distillation.history import History
from dofla.distillation.loop import distill
from dofla.distillation.losses import LOSSES
from dofla.distillation.tracking import tracked
from dofla.distillation.trials import measure_curves

__all__ = ["DIRECT", "LOSSES", "History", "calibrate", "distill", "distill_end_to_end", "measure_curves", "tracked"]
