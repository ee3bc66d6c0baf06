"""Training the feature maps against the softmax attention they replace."""

from dofla.distill.direct import DIRECT
from dofla.distill.loop import SCHEDULES, History, distill
from dofla.distill.losses import LOSSES

__all__ = ["DIRECT", "LOSSES", "SCHEDULES", "History", "distill"]
