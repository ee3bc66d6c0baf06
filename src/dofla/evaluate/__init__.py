"""What linearising cost: loss and next-token distributions, attention layer by layer, sentence embeddings; and what it
cost in use: loss by position, recall, generation."""

from dofla.evaluate.generation import generation_figures
from dofla.evaluate.passkey import passkey_figures
from dofla.evaluate.position import loss_by_position
from dofla.evaluate.recall import recall_figures
from dofla.evaluate.run import evaluate

__all__ = ["evaluate", "generation_figures", "loss_by_position", "passkey_figures", "recall_figures"]
