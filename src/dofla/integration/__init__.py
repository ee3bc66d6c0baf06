"""The only folder that knows how transformers works inside. Importing it registers dofla with transformers."""

from dofla.integration import interface, quantizer, saving  # noqa: F401 - importing registers
