"""Taking the layers of a streamed model in turn, instead of the texts."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dofla.integration.recorder import recording, run_body
from dofla.integration.streaming.layers import Wrap, in_memory, is_streamed, layers_of, output_form, replaced
from dofla.integration.streaming.states import HiddenStates, fingerprints


class Turn:
    """A part of a model that runs at one time: the whole model, or one of its layers.

    Attributes:
        number, count: of this turn, from 0, and of all.
        prefix: of the names of the modules that run in it.
        name: of the layer; empty of a whole model.
    """

    def __init__(self, number: int = 0, count: int = 1, prefix: str = "") -> None:
        self.number, self.count, self.prefix = number, count, prefix
        self.name = prefix.removesuffix(".")

    def carry(self, batches: Iterable[Mapping[str, Tensor]]) -> None:
        """See to it that the next turn finds what this one makes of batches. Nothing to do if there is none."""


def in_turn(
    model: PreTrainedModel, folder: str | Path | None = None, *, whole: bool = False
) -> Generator[Turn, None, None]:
    """The turns in which the body of a model is to be run over a text: one, or, if it is streamed, one per layer.

    In the turn of a layer the body is that layer alone, its weights in memory, and takes what the layer before has
    made of the same windows. So all windows have to be run, as the teacher
    (:func:`dofla.integration.recorder.recording`), in every turn. If it may be left early, it is to be closed.

    Args:
        model: a teacher, or a student that is run as its own teacher.
        folder: for hidden states that do not fit in memory; default the system's temporary folder.
        whole: one turn in any case.

    Raises:
        DoflaError: something else than the layers stands between one layer and the next; a window that was not run
            in the turn before.
    """
    if whole or not is_streamed(model):
        yield Turn()
        return
    layers = layers_of(model)
    wrap = output_form(model)
    before, after = HiddenStates(folder), HiddenStates(folder)
    windows: list[bytes] = []

    def look(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        windows[:] = fingerprints(kwargs)

    watch = model.base_model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        for number, (name, layer) in enumerate(layers.items()):
            turn = _LayersTurn(model, number, len(layers), f"{name}.", after)
            with in_memory(layer), turn.alone(layer, layers.values(), wrap, windows, before):
                yield turn
            before.clear()
            before, after = after, before
    finally:
        watch.remove()
        before.close()
        after.close()


class _LayersTurn(Turn):
    def __init__(self, model: PreTrainedModel, number: int, count: int, prefix: str, after: HiddenStates) -> None:
        super().__init__(number, count, prefix)
        self.model, self.after = model, after

    def carry(self, batches: Iterable[Mapping[str, Tensor]]) -> None:
        if self.number + 1 == self.count:
            return
        for batch in batches:
            if all(window in self.after for window in fingerprints(batch)):
                continue
            with torch.no_grad(), recording(self.model, (), lambda call: None):
                run_body(self.model, batch)

    def alone(
        self, layer: nn.Module, layers: Iterable[nn.Module], wrap: Wrap, windows: list[bytes], before: HiddenStates
    ) -> AbstractContextManager[None]:
        """Within the block the other layers hand on what they get, and this one gets what the one before has made."""
        run = layer.forward

        def pass_on(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            return wrap(hidden)

        def carried(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.number:
                hidden = torch.stack([before.read(window, hidden[0]) for window in windows]).to(hidden.device)
            out = run(hidden, *args, **kwargs)
            if self.number + 1 < self.count:
                for window, states in zip(windows, out[0] if isinstance(out, tuple) else out, strict=True):
                    if window not in self.after:
                        self.after.write(window, states)
            return out

        return replaced({other: carried if other is layer else pass_on for other in layers})
