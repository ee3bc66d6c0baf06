"""Text and token files → windows of tokens, the one thing that all measuring, training and judging reads.

Knows tokenizers by what they do, and no model: a model's own samples are drawn in ``integration``.
"""

import lazy_loader

# Names of sources are checked before anything is computed, so torch is imported only with the windows.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "documents": ["read_documents"],
        "packing": ["text_windows"],
        "windows": ["Images", "TokenWindows", "as_windows", "batches", "predicted"],
    },
)
