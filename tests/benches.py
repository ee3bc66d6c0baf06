"""Scripts of ``benchmarks/`` as modules."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@contextmanager
def scripts(folder: str, *names: str) -> Iterator[list[ModuleType]]:
    """The ``names`` of a folder; within the block its scripts find each other, as they do where one is run."""
    path = list(sys.path)
    sys.path.append(str(BENCHMARKS / folder))
    yield [importlib.import_module(name) for name in names]
    sys.path[:] = path
