"""Parts that belong to the paper alone (arXiv 2507.03340): its theory, features drawn by leverage, errors against the
number of features, and its tables, on models that you can run.

Makes its students as ``runs`` does; nothing but the command line knows of it.
"""

import lazy_loader

# What is exported stands in __init__.pyi, and is imported when it is first used: help on recipes waits for no torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
