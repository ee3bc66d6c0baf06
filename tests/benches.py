"""Scripts of ``benchmarks/`` as modules."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@contextmanager
def scripts(folder: str, *names: str) -> Iterator[list[ModuleType]]:
    """The ``names`` of a folder; within the block its scripts find each other, as they do where one is run."""
    path = list(sys.path)
    sys.path.append(str(BENCHMARKS / folder))
    yield [importlib.import_module(name) for name in names]
    sys.path[:] = path


def script_fixture(folder: str, name: str) -> Any:
    """A fixture of one of them, for the tests of a module."""

    @pytest.fixture(scope="module")
    def script() -> Iterator[ModuleType]:
        with scripts(folder, name) as (module,):
            yield module

    return script
