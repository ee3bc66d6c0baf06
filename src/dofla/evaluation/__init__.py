"""The cost of linearizing a model: loss and next-token distributions, attention layer by layer, sentence embeddings;
and the cost in use: loss by position, recall, generation.

Every figure has student and teacher side by side, by one code path. Knows students, and not how they were made.
"""

from dofla.evaluation.generation import generation_figures
from dofla.evaluation.passkey import passkey_figures
from dofla.evaluation.position import loss_by_position
from dofla.evaluation.recall import recall_figures
from dofla.evaluation.run import Evaluation, evaluate

__all__ = ["Evaluation", "evaluate", "generation_figures", "loss_by_position", "passkey_figures", "recall_figures"]
