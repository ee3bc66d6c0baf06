"""Training the feature maps against the softmax attention they replace, and whole students towards their teacher."""

from dofla.distill.calibrate import calibrate
from dofla.distill.descent import SCHEDULES
from dofla.distill.direct import DIRECT
from dofla.distill.end_to_end import distill_end_to_end
from dofla.distill.loop import History, distill
from dofla.distill.losses import LOSSES
from dofla.distill.tracking import tracked
from dofla.distill.trials import measure_curves

__all__ = [
    "DIRECT",
    "LOSSES",
    "SCHEDULES",
    "History",
    "calibrate",
    "distill",
    "distill_end_to_end",
    "measure_curves",
    "tracked",
]
