"""Packages that only some verbs need."""

from __future__ import annotations

import importlib
from types import ModuleType

from dofla.errors import DoflaError


def extra(name: str) -> ModuleType:
    """A module of the extra ``finetune``; DoflaError that names the extra if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise DoflaError(f"training whole models needs {name}: pip install 'dofla[finetune]'") from None
