"""Everything that knows how transformers works inside; importing it registers dofla with transformers.

Finding attention modules, attaching compressed caches and linear attention and taking them off again, loading, saving
and sharing with the record that a model card is made from; and what runs a model to measure it: profiles and the
model's own samples. Knows plans, profiles and windows, and nothing of training.
"""

from dofla.integration import contents, interface, quantizer, saving  # noqa: F401 - importing registers
