"""Turn pretrained softmax transformers into linear-attention models.

    student = dofla.linearize(model, budget=64)
    dofla.distill(student, tokens)
    student.save_pretrained("out")

or, with every layer given the state that it needs,

    profile = dofla.profile(model, tokens)
    curves  = dofla.measure_curves(model, tokens)
    plan    = dofla.allocate(profile, budget=64, strategy="measured", curves=curves)
    student = dofla.linearize(model, plan)

After ``import dofla`` the stock ``AutoModelForCausalLM.from_pretrained("out")`` loads the student.
"""

import dofla.integration  # noqa: F401 - registers dofla with transformers
from dofla.data import TokenWindows
from dofla.distillation import distill, distill_end_to_end, measure_curves, tracked
from dofla.errors import DoflaError
from dofla.evaluation import evaluate
from dofla.integration.checkpoint import load, merge_lora, save_adapter
from dofla.integration.profiler import profile
from dofla.integration.prompt_state import load_state, read_prompt, save_state
from dofla.integration.sampled import sample_features
from dofla.integration.self_samples import token_windows
from dofla.integration.sharing import note, push_adapter
from dofla.integration.surgery import linearize, restore, softmax
from dofla.plans.allocate import allocate
from dofla.plans.curves import Curves
from dofla.plans.plan import LayerPlan, Plan
from dofla.profiles.profile import Profile

__version__ = "0.1.0"

__all__ = [
    "Curves",
    "DoflaError",
    "LayerPlan",
    "Plan",
    "Profile",
    "TokenWindows",
    "allocate",
    "distill",
    "distill_end_to_end",
    "evaluate",
    "linearize",
    "load",
    "load_state",
    "measure_curves",
    "merge_lora",
    "note",
    "profile",
    "push_adapter",
    "read_prompt",
    "restore",
    "sample_features",
    "save_adapter",
    "save_state",
    "softmax",
    "token_windows",
    "tracked",
]
