"""Models larger than memory: their layers stay on disk and are read when they are needed.

A streamed model (``load_model(..., stream=True)``) does all that any other does without gradients through it: each
forward pass reads the layers from their safetensors files, one weight after the other, by accelerate's offloading. What
goes over much text, profiling and layerwise training, takes the layers in turn instead: each is read once, over all the
text, and what it makes of the text is kept in a file for the next.
"""

from dofla.integration.streaming.layers import device_map, is_streamed
from dofla.integration.streaming.turns import Turn, in_turn

__all__ = ["Turn", "device_map", "in_turn", "is_streamed"]
