"""What linearising cost: loss and next-token distributions, attention layer by layer, sentence embeddings."""

from dofla.evaluate.run import evaluate

__all__ = ["evaluate"]
