"""The distillation loop: one teacher forward per batch trains all layers at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofla.data import Images, TokenWindows, as_windows
from dofla.distill.checkpoint import Checkpoint
from dofla.distill.losses import layer_loss
from dofla.errors import DoflaError
from dofla.feature_maps import FeatureMap
from dofla.integration.recorder import AttentionCall, recording, run_body
from dofla.integration.sites import evaluation_mode
from dofla.integration.surgery import linear_layers, plan_of


@dataclass
class History:
    """What a distillation did: ``losses`` [steps, layers] in the order of ``layers``, and how long it took."""

    layers: list[str]
    losses: Tensor
    seconds: float = 0.0
    settings: dict = field(default_factory=dict)


def distill(
    student: PreTrainedModel,
    tokens: TokenWindows | Images | Tensor | Mapping[str, Tensor],
    *,
    loss: str = "softmax",
    epochs: int = 1,
    steps: int | None = None,
    batch_size: int = 4,
    accumulate: int = 1,
    rows: int | None = None,
    learning_rates: Mapping[str, float] | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    checkpoint_every: int = 50,
    progress: Callable[[int, int, dict[str, float]], None] | None = None,
) -> History:
    """Train the feature maps of a linearised model, each layer against its own softmax attention.

    The model runs once per batch with softmax attention and without gradients. As each layer is reached, the loss of
    its feature maps on the teacher's queries and keys is computed and propagated at once, so no graph crosses layers
    and memory holds one layer's graph, however deep the model is. Everything but the feature maps stays frozen.

    Args:
        student: a linearised model; it is its own teacher.
        tokens: windows to train on.
        loss: a name in :data:`dofla.distill.LOSSES`.
        epochs: passes over the tokens, unless ``steps`` says how many optimiser steps to take.
        batch_size: windows per forward pass.
        accumulate: forward passes per optimiser step.
        rows: query rows per window that the loss looks at, drawn anew each time: an unbiased estimate at a fraction of
            the cost. Default: all.
        learning_rates: by parameter name, over the feature map's own; they fall to 0 along a cosine.
        seed: of the order of the windows and of the rows.
        folder: where checkpoints and curves go. If a run of the same settings stopped there, it goes on, and ends with
            the same numbers as if it had not stopped.
        checkpoint_every: steps between checkpoints.
        progress: called with (step, steps, loss of each layer) after each step.

    Raises:
        DoflaError: not linearised; unknown loss or parameter; a number out of range; fewer windows than one step
            takes; a loss that is not finite, naming layer and step (nothing of that step is saved); a folder holding
            a run of other settings.
    """
    layers = linear_layers(student)
    compute_loss = layer_loss(loss)
    windows = as_windows(tokens)
    _check_numbers(epochs=epochs, batch_size=batch_size, accumulate=accumulate, checkpoint_every=checkpoint_every)
    _check_numbers(**{k: v for k, v in (("steps", steps), ("rows", rows)) if v is not None})
    per_step = batch_size * accumulate
    if len(windows) < per_step:
        raise DoflaError(f"{len(windows)} windows are too few for one step of {per_step}: give more text or less batch")
    steps = steps or epochs * (len(windows) // per_step)
    settings = {"loss": loss, "steps": steps, "batch_size": batch_size, "accumulate": accumulate, "rows": rows}
    settings |= {"seed": seed, "learning_rates": dict(learning_rates or {})}

    optimizer = torch.optim.Adam(_parameter_groups(layers, learning_rates or {}))
    optimizer.zero_grad()  # of what a run that was broken off may have left
    rates = [group["lr"] for group in optimizer.param_groups]
    curve: list[list[float]] = []
    checkpoint = Checkpoint(folder, settings, plan_of(student), windows) if folder is not None else None
    if checkpoint is not None:
        curve = checkpoint.resume(layers, optimizer)

    started = time.perf_counter()
    for step in range(len(curve), steps):
        losses = dict.fromkeys(layers, 0.0)

        def learn(call: AttentionCall, losses=losses, step=step) -> None:
            chosen = _rows(call, rows, seed, step)
            with torch.enable_grad():
                value = compute_loss(call, layers[call.name], chosen) / accumulate
            if not torch.isfinite(value):
                raise DoflaError(f"the loss of layer {call.name} is {value.item()} at step {step}: NaN in activations")
            value.backward()
            losses[call.name] += value.item()

        with evaluation_mode(student), recording(student, layers, learn), torch.no_grad():
            for batch in _batches(windows, batch_size, accumulate, seed, step):
                run_body(student, batch)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.step()
        optimizer.zero_grad()
        curve.append(list(losses.values()))
        if checkpoint is not None and (len(curve) % checkpoint_every == 0 or len(curve) == steps):
            checkpoint.save(layers, optimizer, curve)
        if progress:
            progress(len(curve), steps, losses)
    return History(list(layers), torch.tensor(curve), time.perf_counter() - started, settings)


def _parameter_groups(layers: Mapping[str, torch.nn.Module], given: Mapping[str, float]) -> list[dict]:
    groups: dict[str, dict] = {}
    for layer in layers.values():
        for feature_map in layer.maps:
            for name, parameter in feature_map.named_parameters():
                group = groups.setdefault(name, {"params": [], "lr": _rate(feature_map, name, given)})
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


def _batches(windows: TokenWindows | Images, batch_size: int, accumulate: int, seed: int, step: int):
    """The batches of one step: a function of seed and step alone, so a resumed run sees the same ones."""
    per_step = batch_size * accumulate
    steps_per_epoch = len(windows) // per_step
    epoch, place = divmod(step, steps_per_epoch)
    order = torch.randperm(len(windows), generator=_generator(seed, epoch))
    for chosen in order[place * per_step : (place + 1) * per_step].split(batch_size):
        yield windows.batch(chosen)


def _rows(call: AttentionCall, rows: int | None, seed: int, step: int) -> Tensor:
    return call.random_rows(rows or call.query.shape[-2], _generator(seed, step))


def _generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + number)


def _check_numbers(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise DoflaError(f"{name} is {value}: give 1 or more")
