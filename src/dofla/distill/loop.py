"""The distillation loop: feature maps trained against the softmax attention they replace, or on the text itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofla.data import Images, TokenWindows, as_windows
from dofla.distill.calibrate import calibrate
from dofla.distill.checkpoint import Checkpoint
from dofla.distill.direct import DIRECT, next_token_gradients
from dofla.distill.layerwise import layerwise_gradients
from dofla.distill.losses import LOSSES
from dofla.distill.places import check_reach, placed_anywhere, placed_evenly
from dofla.distill.steps import batches_of_step, check_choice, check_enough, check_numbers, generator_of
from dofla.errors import DoflaError
from dofla.feature_maps import FeatureMap
from dofla.integration.sites import evaluation_mode
from dofla.integration.surgery import linear_layers, plan_of

SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "constant": lambda done: 1.0,
}
"""Share of the learning rate, by the share of the steps that are done. The paper names rates and no schedule."""


@dataclass
class History:
    """What a distillation did: ``losses`` [steps, layers] in the order of ``layers``, and how long it took.

    With the direct loss, which all layers share, there is one column, called after it.
    """

    layers: list[str]
    losses: Tensor
    seconds: float = 0.0
    settings: dict = field(default_factory=dict)


def distill(
    student: PreTrainedModel,
    tokens: TokenWindows | Images | Tensor | Mapping[str, Tensor],
    *,
    loss: str = "output",
    epochs: int = 1,
    steps: int | None = None,
    batch_size: int = 2,
    accumulate: int = 1,
    rows: int | None = 64,
    learning_rates: Mapping[str, float] | None = None,
    schedule: str = "cosine",
    own_inputs: float = 0.0,
    from_data: bool = True,
    reach: int | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    checkpoint_every: int = 50,
    progress: Callable[[int, int, dict[str, float]], None] | None = None,
) -> History:
    """Train the feature maps of a linearised model (arXiv 2507.03340, section 4). Everything else stays frozen.

    The losses ``softmax``, ``l2`` and ``output`` train each layer against its own softmax attention: the model runs
    once per batch with softmax attention and without gradients, and as each layer is reached, the loss of its feature
    maps on the teacher's queries and keys is computed and propagated at once, so no graph crosses layers and memory
    holds one layer's graph, however deep the model is. ``direct`` is the next-token loss of the whole linearised model.

    Maps that start from data (:func:`dofla.distill.calibrate`) do so on the first batch.

    Args:
        student: a linearised model; it is its own teacher.
        tokens: windows to train on.
        loss: a name in :data:`dofla.distill.LOSSES`, or ``direct``.
        epochs: passes over the tokens, unless ``steps`` says how many optimiser steps to take.
        batch_size: windows per forward pass.
        accumulate: forward passes per optimiser step.
        rows: query rows per window that the loss looks at, drawn anew each time, at a fraction of the cost of
            all (None); of ``softmax`` an unbiased estimate. ``direct`` sees all in any case.
        learning_rates: by parameter name, over the feature map's own.
        schedule: a name in :data:`SCHEDULES`: ``cosine``, falling to 0, or ``constant``.
        own_inputs: share of the steps, at the end, in which layers are trained on the queries and keys that they get
            in the student, behind linear layers, towards the attention that the teacher has there. Such a step takes
            two forwards. Not for ``direct``, which never does otherwise.
        from_data: let maps that start from data do so.
        reach: read the windows as if they began anywhere among so many positions (of models with rotary ones, where the
            teacher does not notice). Features see positions through the queries and keys, and a student whose training
            showed it the first L alone is lost beyond them; one trained with a reach loses a little within L.
        seed: of the order of the windows and of the rows.
        folder: where checkpoints and curves go. If a run of the same settings stopped there, it goes on, and ends with
            the same numbers as if it had not stopped.
        checkpoint_every: steps between checkpoints.
        progress: called with (step, steps, loss of each layer) after each step.

    Raises:
        DoflaError: not linearised; unknown loss, schedule or parameter; ``direct`` for a model that predicts no
            next token; a number out of range; fewer windows than one step
            takes; a loss that is not finite, naming layer and step (nothing of that step is saved); a folder holding
            a run of other settings.
    """
    layers = linear_layers(student)
    check_choice("loss", loss, [*LOSSES, DIRECT])
    check_choice("schedule", schedule, SCHEDULES)
    windows = as_windows(tokens)
    check_numbers(epochs=epochs, batch_size=batch_size, accumulate=accumulate, checkpoint_every=checkpoint_every)
    check_numbers(**{k: v for k, v in (("steps", steps), ("rows", rows)) if v is not None})
    if not 0 <= own_inputs <= 1 or (own_inputs and loss == DIRECT):
        raise DoflaError(f"own_inputs is {own_inputs}, loss {loss!r}: give a share of the steps, 0 to 1 (0 for direct)")
    check_reach(student, windows, reach)
    per_step = batch_size * accumulate
    check_enough(windows, per_step)
    steps = steps or epochs * (len(windows) // per_step)
    settings = {"loss": loss, "steps": steps, "batch_size": batch_size, "accumulate": accumulate, "rows": rows}
    settings |= {"seed": seed, "learning_rates": dict(learning_rates or {}), "schedule": schedule}
    settings |= {"own_inputs": own_inputs, "from_data": from_data, "reach": reach}

    optimizer = torch.optim.Adam(_parameter_groups(layers, learning_rates or {}))
    optimizer.zero_grad()  # of what a run that was broken off may have left
    rates = [group["lr"] for group in optimizer.param_groups]
    curve: list[list[float]] = []
    columns = [DIRECT] if loss == DIRECT else list(layers)
    checkpoint = Checkpoint(folder, settings, plan_of(student), windows) if folder is not None else None
    if checkpoint is not None:
        curve = checkpoint.resume(layers, optimizer, columns)

    started = time.perf_counter()
    if from_data and not curve:
        first = batches_of_step(windows, batch_size, accumulate, seed, 0)[0]
        with evaluation_mode(student):
            calibrate(student, placed_evenly(first, reach))
    for step in range(len(curve), steps):
        batches, places = batches_of_step(windows, batch_size, accumulate, seed, step), generator_of(seed, step)
        batches = [placed_anywhere(batch, reach, places) for batch in batches]
        with evaluation_mode(student):
            if loss == DIRECT:
                losses = next_token_gradients(student, batches)
            else:
                options = {"rows": rows, "own_inputs": step >= steps * (1 - own_inputs)}
                generator = partial(generator_of, seed, step)
                losses = layerwise_gradients(student, batches, loss=loss, generator=generator, **options)
        for name, value in losses.items():
            if not math.isfinite(value):
                what = "next-token loss" if loss == DIRECT else f"loss of layer {name}"
                raise DoflaError(f"the {what} is {value} at step {step}: NaN in activations")
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * SCHEDULES[schedule](step / steps)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(list(losses.values()))
        if checkpoint is not None and (len(curve) % checkpoint_every == 0 or len(curve) == steps):
            checkpoint.save(layers, optimizer, curve, columns)
        if progress:
            progress(len(curve), steps, losses)
    return History(columns, torch.tensor(curve), time.perf_counter() - started, settings)


def _parameter_groups(layers: Mapping[str, torch.nn.Module], given: Mapping[str, float]) -> list[dict]:
    groups: dict[str, dict] = {}
    for layer in layers.values():
        for feature_map in layer.maps:
            for name, parameter in feature_map.named_parameters():
                start = {"params": [], "lr": _rate(feature_map, name, given), "betas": feature_map.betas}
                group = groups.setdefault(name, start)
                group["params"].append(parameter)
    unknown = set(given) - set(groups)
    if unknown:
        known = ", ".join(sorted(groups))
        raise DoflaError(f"learning_rates names {sorted(unknown)[0]!r}: the feature maps have {known}")
    if not groups:
        raise DoflaError("the feature maps of this plan have nothing to train")
    return list(groups.values())


def _rate(feature_map: FeatureMap, name: str, given: Mapping[str, float]) -> float:
    rate = given.get(name, feature_map.learning_rates.get(name))
    if rate is None or not 0 < rate < math.inf:
        raise DoflaError(f"the learning rate of {name!r} is {rate}: give a positive number in learning_rates")
    return rate
