"""The cost of linearizing a model: loss and next-token distributions, attention layer by layer, sentence embeddings.

Every figure has model and original side by side, by one code path. Knows converted models, and not how they were made.
"""

from dofla.evaluation.run import Evaluation, evaluate

__all__ = ["Evaluation", "evaluate"]
