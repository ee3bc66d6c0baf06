"""The table of backends. One is chosen for each call of a layer; all give the same results.

To add one: a folder with a subclass of :class:`~dofla.attention.backend.Backend`, and an entry here.
"""

from collections.abc import Sequence

from torch import Tensor

from dofla.attention.backend import Backend
from dofla.attention.compiled.backend import Compiled
from dofla.attention.gpu.backend import Triton

BACKENDS: tuple[Backend, ...] = (Triton(), Compiled(), Backend())
"""The first that takes a call does it."""


def backend_for(vectors: Sequence[Tensor], others: Sequence[Tensor] = ()) -> Backend:
    """The backend of a call with these queries, keys and values, and other inputs such as weights of tokens."""
    return next(backend for backend in BACKENDS if backend.takes(vectors, others))
