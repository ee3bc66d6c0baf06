"""The attention of one module: groups of KV heads, with compressed caches or with feature maps, and how a plan makes
it.

Knows the arithmetic, feature maps and plans; nothing of transformers.
"""

from dofla.layers.layer import AttentionLayer
from dofla.layers.make import layer_of, parts_of
from dofla.layers.pages import read_pages

__all__ = ["AttentionLayer", "layer_of", "parts_of", "read_pages"]
