"""The attention that a model computes in a thread: its own, or another by name, as its original's."""

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

import torch
from transformers import PreTrainedModel

DOFLA, RECORDING = "dofla", "dofla_recording"
"""The names under which dofla's attention is registered, and that which shows its inputs to a visitor."""
INSTEAD: ContextVar[Mapping[int, str]] = ContextVar("dofla_instead", default={})  # noqa: B039 never changed
"""The attention that models compute instead of dofla's, by the id of their config."""


@contextmanager
def computing(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Within the block, and in this thread alone, a converted model computes the attention registered as ``name``.

    Compiled graphs have the attention that they were traced with: no thread uses any meanwhile.
    """
    token = INSTEAD.set({**INSTEAD.get(), **dict.fromkeys(configs_of(model), name)})
    _no_graphs.enter()
    try:
        yield
    finally:
        _no_graphs.leave()
        INSTEAD.reset(token)


def computed_instead(config: object) -> str | None:
    """The name of the attention that models with this config compute in this thread; None if it is dofla's."""
    return None if torch.compiler.is_compiling() else INSTEAD.get().get(id(config))


def configs_of(model: PreTrainedModel) -> set[int]:
    """The ids of the configs of a model and its parts."""
    return {id(own) for module in model.modules() if (own := getattr(module, "config", None)) is not None}


class _NoGraphs:
    """From the first that enters to the last that leaves, in any thread, compiled models run without their graphs."""

    def __init__(self) -> None:
        self.lock, self.inside, self.stance = threading.Lock(), 0, ExitStack()

    def enter(self) -> None:
        with self.lock:
            self.inside += 1
            if self.inside == 1 and "torch._dynamo" in sys.modules:  # else nothing is compiled
                self.stance.enter_context(torch.compiler.set_stance("force_eager"))

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                self.stance.close()


_no_graphs = _NoGraphs()
