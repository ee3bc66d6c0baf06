from .compiled_model import CompiledModel
from .continuous_batching import ContinuousBatching
from .prompt_state import load_state, read_prompt, save_state
from .session import Session
from .stream import Stream

__all__ = ["CompiledModel", "ContinuousBatching", "Session", "Stream", "load_state", "read_prompt", "save_state"]
