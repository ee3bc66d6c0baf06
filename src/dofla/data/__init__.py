"""Text, token files and the model's own samples → windows of tokens."""

from dofla.data.documents import read_documents
from dofla.data.packing import token_windows
from dofla.data.sampling import self_sample
from dofla.data.windows import Images, TokenWindows, as_windows, batches, predicted

__all__ = [
    "Images",
    "TokenWindows",
    "as_windows",
    "batches",
    "predicted",
    "read_documents",
    "self_sample",
    "token_windows",
]
