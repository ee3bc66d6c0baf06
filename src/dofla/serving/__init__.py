"""Text from a compressed model beyond ``generate``: conversations that are read once, calls of several threads in one
batch, texts without end, saved prompts, compiled decoding, and the server of ``dofla serve``."""

import lazy_loader

# What is exported stands in __init__.pyi, and is imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
