"""Turn pretrained softmax transformers into linear-attention models.

    profile = dofla.profile(model, tokens)
    plan    = dofla.allocate(profile, budget=64, strategy="dof", feature_map="prf")
    student = dofla.linearize(model, plan)
    dofla.distill(student, tokens, loss="softmax")
    student.save_pretrained("out")

After ``import dofla`` the stock ``AutoModelForCausalLM.from_pretrained("out")`` loads the student.
"""

import dofla.integration  # noqa: F401 - registers dofla with transformers
from dofla.allocate import allocate
from dofla.data import TokenWindows, token_windows
from dofla.distill import distill
from dofla.errors import DoflaError
from dofla.evaluate import evaluate
from dofla.integration.checkpoint import load, save_adapter
from dofla.integration.profiler import profile
from dofla.integration.prompt_state import load_state, read_prompt, save_state
from dofla.integration.sampled import sample_features
from dofla.integration.surgery import linearize, restore, softmax
from dofla.plan import LayerPlan, Plan
from dofla.profile import Profile

__version__ = "0.1.0"

__all__ = [
    "DoflaError",
    "LayerPlan",
    "Plan",
    "Profile",
    "TokenWindows",
    "allocate",
    "distill",
    "evaluate",
    "linearize",
    "load",
    "load_state",
    "profile",
    "read_prompt",
    "restore",
    "sample_features",
    "save_adapter",
    "save_state",
    "softmax",
    "token_windows",
]
