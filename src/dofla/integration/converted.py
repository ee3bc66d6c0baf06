"""Converted: the handle of a converted model, which functions hand down instead of asking the model again."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from dofla.errors import DoflaError
from dofla.integration.attaching import SOFTMAX, AttachedLayer
from dofla.integration.record import Record
from dofla.plans.plan import Plan


@dataclass(frozen=True)
class Converted:
    """A converted model and what is known of it.

    Attributes:
        model: the model of transformers, with compressed caches or linear attention.
        layers: attention of each converted module, by the module's name.
        plan: what it was converted by.
        record: where it comes from, how it was trained and how it did.
    """

    model: PreTrainedModel
    layers: dict[str, AttachedLayer]
    plan: Plan
    record: Record

    @classmethod
    def of(cls, model: PreTrainedModel) -> Converted:
        """The handle of a model; DoflaError if it has not been converted."""
        if not is_converted(model):
            raise DoflaError(
                "the model is not converted: run dofla compress first, or call dofla.compress(model, windows) or "
                "dofla.linear.linearize(model, plan)"
            )
        layers = {m.name: m for m in model.modules() if isinstance(m, AttachedLayer)}
        config = model.config.quantization_config
        return cls(model, layers, config.plan, config.record)


def is_converted(model: PreTrainedModel) -> bool:
    """True if the model has been converted."""
    return hasattr(model, SOFTMAX)
