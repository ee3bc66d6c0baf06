"""Training the feature maps against the softmax attention they replace."""

from dofla.distill.layerwise import History, distill
from dofla.distill.losses import LOSSES

__all__ = ["LOSSES", "History", "distill"]
