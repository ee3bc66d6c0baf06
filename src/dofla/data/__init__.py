"""Text and token files → windows of tokens: what every room above takes. Knows nothing of models."""

from dofla.data.documents import read_documents
from dofla.data.packing import text_windows
from dofla.data.windows import Images, TokenWindows, as_windows, batches, predicted

__all__ = [
    "Images",
    "TokenWindows",
    "as_windows",
    "batches",
    "predicted",
    "read_documents",
    "text_windows",
]
