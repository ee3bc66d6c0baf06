"""The attention of one module, made by a plan: groups of KV heads, with compressed caches or with feature maps.

Knows the arithmetic, feature maps and plans; nothing of transformers.
"""

from dofla.layers.constants import check_constants
from dofla.layers.layer import AttentionLayer
from dofla.layers.make import layer_of, parts_of
from dofla.layers.pages import read_pages
from dofla.layers.part import take_heads
from dofla.layers.predictor import ImportancePredictor, input_of

__all__ = [
    "AttentionLayer",
    "ImportancePredictor",
    "check_constants",
    "input_of",
    "layer_of",
    "parts_of",
    "read_pages",
    "take_heads",
]
