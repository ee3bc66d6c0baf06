"""The bundled model, a small softmax transformer that reads children's stories and recalls facts over a distance; text
and tasks for it. ``scripts/demo`` made all of them."""

from pathlib import Path

__all__ = ["TASKS", "WINDOWS", "model_path"]

TASKS, WINDOWS = (Path(__file__).parent / name for name in ("tasks", "windows"))
"""Folders of multiple-choice items (``NAME-SPLIT.jsonl.gz``), and of windows (``SPLIT.safetensors``)."""


def model_path() -> Path:
    """Folder of the bundled model, ready for ``from_pretrained``."""
    return Path(__file__).parent / "model"
