"""Text and token files → windows of tokens, the one thing that all measuring, training and judging reads.

Knows tokenizers by what they do, and no model: a model's own samples are drawn in ``integration``.
"""

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
