"""The weights of a student that train end to end. They are kept if training succeeds, and restored if it fails."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from dofla.integration.converted import Converted
from dofla.integration.lora import lora_factors, low_rank, merge_factors
from dofla.integration.surgery import original


@dataclass(frozen=True)
class Trainable:
    """Weights beside the feature maps that train, by name; and a context in which the student is its teacher."""

    weights: dict[str, nn.Parameter]
    teacher: Callable[[], AbstractContextManager]


@contextmanager
def trainable(student: Converted, weights: str, lora_rank: int) -> Iterator[Trainable]:
    """Within the block only the feature maps and what ``weights`` names have ``requires_grad``, all in float32:
    ``lora``, factors of rank ``lora_rank`` beside every linear layer but the output layer, drawn from the global
    generator; ``maps``, nothing else.

    When the block ends, what was learned is in the student, a stock model of the dtypes it had: low-rank factors are
    merged into its weights. If it fails, the student is as before. DoflaError if peft is not installed.
    """
    layers, model = student.layers.values(), student.model
    before = [{name: tensor.clone() for name, tensor in layer.state_dict().items()} for layer in layers]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    alone = nullcontext(Trainable({}, partial(original, model)))
    try:
        with _low_rank(model, lora_rank) if weights == "lora" else alone as part:
            model.requires_grad_(False)
            for parameter in (*part.weights.values(), *(p for layer in layers for p in layer.parameters())):
                parameter.requires_grad_(True)
            yield part
    except BaseException:
        for layer, state in zip(layers, before, strict=True):
            layer.load_state_dict(state)
        raise
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
            parameter.grad = None


@contextmanager
def _low_rank(student: PreTrainedModel, rank: int) -> Iterator[Trainable]:
    with low_rank(student, rank) as wrapper:

        @contextmanager
        def teacher() -> Iterator[None]:
            with original(student), wrapper.disable_adapter():
                yield

        weights = {name: p for name, p in student.named_parameters() if p.requires_grad and ".lora_" in name}
        yield Trainable(weights, teacher)
        factors = lora_factors(student)
    merge_factors(student, factors)


@contextmanager
def layers_made_again(student: PreTrainedModel, on: bool) -> Iterator[None]:
    """Within the block, if ``on``, layers keep no activations for the backward pass, which computes them again.

    transformers does so in training mode only. The layers enter it, but not the modules in them: so no dropout begins,
    except what the code of the layer itself does (OPT).
    """
    layers = [m for m in student.modules() if on and isinstance(m, GradientCheckpointingLayer)]
    names = ("gradient_checkpointing", "_gradient_checkpointing_func", "training")
    before = [{name: getattr(layer, name, None) for name in names} for layer in layers]
    for layer in layers:
        layer.gradient_checkpointing, layer.training = True, True
        layer._gradient_checkpointing_func = partial(  # type: ignore[assignment] # to torch, an attribute is a module
            checkpoint, use_reentrant=False
        )
    try:
        yield
    finally:
        for layer, values in zip(layers, before, strict=True):
            for name, value in values.items():
                setattr(layer, name, value)
