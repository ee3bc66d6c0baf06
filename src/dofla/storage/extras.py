"""Packages that only some verbs need."""

import importlib
from types import ModuleType

from dofla.errors import DoflaError


class MissingExtra(DoflaError):
    """A package that only some verbs need is not installed."""


def extra(name: str, of: str = "finetune", purpose: str = "training whole models") -> ModuleType:
    """A module of an extra; MissingExtra, which names the extra, if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MissingExtra(f"{purpose} needs {name}: pip install 'dofla[{of}]'") from None
