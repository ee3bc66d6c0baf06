"""The layers of a model, on disk, in memory for a while, and each with another forward function for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dofla.errors import DoflaError
from dofla.integration.recorder import run_body
from dofla.integration.sites import a_few_tokens

Wrap = Callable[[Tensor], Any]
"""Hidden states as a layer returns them."""


def is_streamed(model: PreTrainedModel) -> bool:
    """True if layers of the model stay on disk."""
    return "disk" in getattr(model, "hf_device_map", {}).values()


def device_map(empty: PreTrainedModel, device: torch.device) -> dict[str, str]:
    """Where the modules of a model go that is to be streamed: its layers on disk, the output layer as well unless its
    weight is the embedding's, the rest on ``device``.

    Args:
        empty: the model on the meta device.
        device: that computes.

    Raises:
        DoflaError: a model without layers.
    """
    on_disk = set(layers_of(empty))
    if not on_disk:
        raise DoflaError(f"{type(empty).__name__} has no layers that could stay on disk: open it without stream")
    tied = getattr(empty.config.get_text_config(), "tie_word_embeddings", False)
    head = None if tied else empty.get_output_embeddings()
    places: dict[str, str] = {}

    def place(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            name = prefix + name
            if any(layer.startswith(f"{name}.") for layer in on_disk):
                place(child, f"{name}.")
            else:
                places[name] = "disk" if name in on_disk or child is head else str(device)

    place(empty, "")
    return places


def layers_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The layers of the model by name, in order; layers within layers are part of them."""
    # Here and not above: it may be this very module of transformers that is being imported when dofla registers.
    from transformers.modeling_layers import GradientCheckpointingLayer

    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and not any(name.startswith(f"{x}.") for x in found):
            found[name] = module
    return found


@contextmanager
def in_memory(layer: nn.Module) -> Iterator[None]:
    """Within the block the weights of an offloaded layer are on the device that computes."""
    offloading = []
    for module in layer.modules():
        if (hook := vars(module).get("_hf_hook")) is not None:  # getattr takes long to find nothing
            offloading += [(module, x) for x in getattr(hook, "hooks", [hook]) if getattr(x, "offload", False)]
    for module, hook in offloading:
        hook.pre_forward(module)
        hook.offload = False
    try:
        yield
    finally:
        for module, hook in offloading:
            hook.offload = True
            hook.post_forward(module, None)


@contextmanager
def replaced(forwards: Mapping[nn.Module, Callable]) -> Iterator[None]:
    """Within the block modules have other forward functions."""
    own = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, before in own.items():
            del module.forward
            if before is not None:  # accelerate's
                module.forward = before


def output_form(model: PreTrainedModel) -> Wrap:
    """The form in which the layers return hidden states: a tensor, or a tuple of one. No layer is read for it: in the
    right form each layer is handed the very tensor that the one before has given.

    Raises:
        DoflaError: if neither is right, as something else happens between the layers.
    """
    layers = list(layers_of(model).values())
    for wrap in (lambda hidden: hidden, lambda hidden: (hidden,)):
        if _hand_on(model, layers, wrap):
            return wrap
    raise DoflaError(
        f"the layers of {type(model).__name__} do not simply follow one another, so they cannot be taken in turn: "
        "open it without stream"
    )


def _hand_on(model: PreTrainedModel, layers: Sequence[nn.Module], wrap: Wrap) -> bool:
    """True if the body works with layers that return what they get in this form, and hands it from each to the next."""
    given: list[Tensor] = []

    def layer(number: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if len(given) != number or (given and hidden is not given[-1]):
            raise LookupError
        given.append(hidden.clone())
        return wrap(given[-1])

    try:
        with torch.no_grad(), replaced({module: partial(layer, n) for n, module in enumerate(layers)}):
            run_body(model, a_few_tokens(model))
    except (LookupError, TypeError, AttributeError, RuntimeError):
        return False
    return len(given) == len(layers)
