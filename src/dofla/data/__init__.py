"""Text and token files → windows of tokens, the one thing that all measuring, training and judging reads.

Knows tokenizers by what they do, and no model: a model's own samples are drawn in ``integration``.
"""

import lazy_loader

# Names of sources are checked before anything is computed, so torch is imported only with the windows: what is exported
# stands in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
