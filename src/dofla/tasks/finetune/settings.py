"""The settings of arXiv 2507.03340: learning rates of its appendix, batch sizes of its Table 9, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from transformers import PreTrainedConfig


class Family(NamedTuple):
    """The paper's fine-tuning settings for one of its models; tuples in the order of :data:`TASKS`.

    Attributes:
        shape: entries of a config by which the model is known, whatever its folder is called.
        rates: learning rates, the best for the softmax original.
        batch_sizes: items per optimizer step.
    """

    shape: dict[str, str | int]
    rates: tuple[float, ...]
    batch_sizes: tuple[int, ...]


TASKS = ("piqa", "logiqa", "arc_easy", "arc_challenge", "winogrande", "mmlu", "wsc273")

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        {"model_type": "gpt2", "hidden_size": 768, "num_hidden_layers": 12},
        (1e-4, 5e-5, 1e-4, 1e-5, 5e-4, 1e-6, 1e-6),
        (128, 64, 64, 64, 128, 64, 128),
    ),
    "pythia-1b": Family(
        {"model_type": "gpt_neox", "hidden_size": 2048, "num_hidden_layers": 16},
        (1e-5, 5e-5, 5e-5, 5e-5, 5e-5, 5e-6, 5e-5),
        (64, 32, 32, 32, 64, 32, 64),
    ),
}

OTHER_RATE, OTHER_BATCH_SIZE = 1e-5, 16
"""For models and tasks the paper does not have: one of its lower rates, as newer models have more to lose, and a batch
small enough for a few hundred items to give enough steps."""

OTHER_LORA_RATE = 1e-3
"""Likewise for low-rank training: at 2e-4 a model of 135M parameters learned next to nothing from eight steps."""

LORA_FACTOR = 10.0
"""LoRA's factors begin at a product of zero and are shared by few numbers, so they want larger steps than weights."""


@dataclass(frozen=True)
class Settings:
    """Settings for fine-tuning one model on one task.

    Attributes:
        learning_rate: at its peak.
        batch_size: items per optimizer step.
        epochs: passes over the training items.
        keep: ``best`` or ``last``: the epoch whose accuracy and weights count.
        source: whose settings these are, for the record.
    """

    learning_rate: float
    batch_size: int
    epochs: int = 3
    keep: str = "best"
    source: str = "default"


def settings_for(config: PreTrainedConfig, task: str, *, lora: bool = False) -> Settings:
    """The paper's settings if it fine-tunes this model on this task, defaults otherwise.

    A student has the config of its teacher and so the same settings, as in the paper.

    Args:
        config: of the model.
        task: a name in :data:`TASKS`, or any other.
        lora: for low-rank training, of which the paper says nothing: :data:`LORA_FACTOR` times its rates, or
            :data:`OTHER_LORA_RATE`.
    """
    factor = LORA_FACTOR if lora else 1.0
    epochs, keep = (1, "last") if task == "mmlu" else (Settings.epochs, Settings.keep)
    for name, family in FAMILIES.items():
        if task in TASKS and all(getattr(config, key, None) == value for key, value in family.shape.items()):
            place = TASKS.index(task)
            rate, size = family.rates[place] * factor, family.batch_sizes[place]
            return Settings(rate, size, epochs, keep, source=f"paper, {name}")
    return Settings(OTHER_LORA_RATE if lora else OTHER_RATE, OTHER_BATCH_SIZE, epochs, keep)
