"""The paper's linear attention: measure how many features each attention layer needs, allocate them, and train each
layer's feature map against the softmax attention it replaces.

    profile = dofla.linear.profile(model, windows)
    plan = dofla.linear.allocate(profile, budget=64)
    dofla.linear.linearize(model, plan)
    dofla.linear.distill(model, windows)
"""

from dofla.distillation.end_to_end import distill_end_to_end
from dofla.distillation.loop import distill
from dofla.distillation.tracking import tracked
from dofla.distillation.trials import measure_curves
from dofla.integration.checkpoint import merge_lora
from dofla.integration.profiler import profile
from dofla.integration.surgery import linearize
from dofla.plans.allocate import allocate
from dofla.plans.curves import Curves
from dofla.plans.layers import CompressedLayer, FeatureLayer, LayerPlan, SoftmaxLayer
from dofla.plans.plan import Plan
from dofla.profiles.profile import Profile

__all__ = [
    "CompressedLayer",
    "Curves",
    "FeatureLayer",
    "LayerPlan",
    "Plan",
    "Profile",
    "SoftmaxLayer",
    "allocate",
    "distill",
    "distill_end_to_end",
    "linearize",
    "measure_curves",
    "merge_lora",
    "profile",
    "tracked",
]
