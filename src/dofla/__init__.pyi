# What `import dofla` exports, and where it lives: read by dofla itself, and by editors.
from . import linear, serving
from .compression.calibrate import calibrate
from .compression.calibration import Calibration
from .compression.compress import compress
from .compression.config import CacheConfig
from .data.windows import TokenWindows
from .errors import DoflaError
from .evaluation.run import Evaluation, evaluate
from .integration.checkpoint import load, save_adapter
from .integration.self_samples import token_windows
from .integration.sharing import note, push_adapter
from .integration.surgery import original, restore
from .runs.check import Check, check
from .runs.frontier import Frontier, frontier
from .runs.opening import demo

__version__: str

__all__ = [
    "CacheConfig",
    "Calibration",
    "Check",
    "DoflaError",
    "Evaluation",
    "Frontier",
    "TokenWindows",
    "calibrate",
    "check",
    "compress",
    "demo",
    "evaluate",
    "frontier",
    "linear",
    "load",
    "note",
    "original",
    "push_adapter",
    "restore",
    "save_adapter",
    "serving",
    "token_windows",
]
