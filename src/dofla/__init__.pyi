# What `import dofla` exports, and where it lives: read by dofla itself, and by editors.
from .compression.calibrate import calibrate
from .compression.calibration import Calibration
from .compression.compress import compress
from .compression.config import CacheConfig
from .data.windows import TokenWindows
from .distillation.end_to_end import distill_end_to_end
from .distillation.loop import distill
from .distillation.tracking import tracked
from .distillation.trials import measure_curves
from .errors import DoflaError
from .evaluation.run import evaluate
from .integration.checkpoint import load, merge_lora, save_adapter
from .integration.profiler import profile
from .integration.self_samples import token_windows
from .integration.sharing import note, push_adapter
from .integration.surgery import linearize, restore, softmax
from .plans.allocate import allocate
from .plans.curves import Curves
from .plans.plan import LayerPlan, Plan
from .profiles.profile import Profile
from .runs.bundled import demo
from .runs.check import check
from .runs.frontier import frontier
from .serving.compiling import compile_generate
from .serving.continuous_batching import continuous_batching
from .serving.prompt_state import load_state, read_prompt, save_state
from .serving.sessions import keep_sessions
from .serving.stream import Stream

__version__: str

__all__ = [
    "CacheConfig",
    "Calibration",
    "Curves",
    "DoflaError",
    "LayerPlan",
    "Plan",
    "Profile",
    "Stream",
    "TokenWindows",
    "allocate",
    "calibrate",
    "check",
    "compile_generate",
    "compress",
    "continuous_batching",
    "demo",
    "distill",
    "distill_end_to_end",
    "evaluate",
    "frontier",
    "keep_sessions",
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
    "save_adapter",
    "save_state",
    "softmax",
    "token_windows",
    "tracked",
]
