# What `dofla.data` exports, and where it lives: read by dofla itself, by editors and by type checkers.
from .documents import read_documents
from .packing import text_windows
from .windows import Images, TokenWindows, as_windows, batches, counted, predicted

__all__ = ["Images", "TokenWindows", "as_windows", "batches", "counted", "predicted", "read_documents", "text_windows"]
