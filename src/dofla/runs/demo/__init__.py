"""The bundled teacher: a small softmax transformer that reads children's stories and recalls facts over a distance."""

from pathlib import Path

__all__ = ["teacher_path"]


def teacher_path() -> Path:
    """Folder of the bundled teacher, ready for ``from_pretrained``."""
    return Path(__file__).parent / "teacher"
