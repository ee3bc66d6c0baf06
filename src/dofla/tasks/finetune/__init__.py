"""Fine-tuning on multiple-choice tasks, teachers and students alike."""

from dofla.tasks.finetune.loop import Epoch, FineTuneResult, finetune
from dofla.tasks.finetune.settings import Settings, settings_for

__all__ = ["Epoch", "FineTuneResult", "Settings", "finetune", "settings_for"]
