"""What trials on single layers share: what a few layers of a model see, kept, so that the model runs once; and fits."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from dofla.distillation import SCHEDULES
from dofla.integration.recorder import AttentionCall, recording, run_body
from dofla.integration.sites import attention_sites, evaluation_mode
from dofla.plans.hybrid import HeadCost
from dofla.runs.recipe import DataSpec
from dofla.runs.teacher import load_teacher, windows_of

Model = Annotated[str, typer.Option("--model", help="Folder, hub name or demo.")]
Source = Annotated[str, typer.Option(help="Text, as data.source of a recipe.")]
Layers = Annotated[int, typer.Option(help="How many, evenly spread over the depth.")]
Out = Annotated[Path | None, typer.Option(help="JSON file to write.")]

Calls = dict[str, list[AttentionCall]]
"""By layer, its calls on single windows, all of one length."""


def collect(model: str, dtype: str | None, source: str, length: int, windows: int, layers: int) -> tuple[Calls, int]:
    """The calls of ``layers`` layers, evenly spread over the depth, and the bytes of a number of the model."""
    teacher, tokenizer = load_teacher(model, dtype)
    text = windows_of(DataSpec(source, length, windows), teacher, tokenizer, seed=0)
    names = list(attention_sites(teacher))
    places = {round(n * (len(names) - 1) / max(layers - 1, 1)) for n in range(layers)}
    calls: Calls = {names[place]: [] for place in sorted(places)}
    with evaluation_mode(teacher), recording(teacher, calls, lambda c: calls[c.name].append(c)), torch.no_grad():
        for n in range(windows):
            run_body(teacher, text.batch([n]))
    return calls, teacher.dtype.itemsize


def cost_of(calls: Calls, itemsize: int) -> HeadCost:
    """What a KV head's state costs, tokens in eight bits."""
    first = next(iter(calls.values()))[0]
    return HeadCost.of(first.key.shape[-1], first.value.shape[-1], itemsize, "int8")


def optimise(
    module: nn.Module, steps: int, loss: Callable[[], Tensor], betas: tuple[float, float] = (0.9, 0.95)
) -> None:
    """Adam on a loss that draws its own sample, each parameter at the rate that ``learning_rates`` of its module names,
    falling to 0 as in distillation; nothing if there is nothing to train."""
    rates = [(part.learning_rates[n], p) for part in module.modules() for n, p in part.named_parameters(recurse=False)]
    if not rates:
        return
    optimizer = torch.optim.Adam([{"params": [p], "lr": rate, "start": rate} for rate, p in rates], betas=betas)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = group["start"] * SCHEDULES["cosine"](step / steps)
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def drawn(calls: list[AttentionCall], generator: torch.Generator) -> AttentionCall:
    """One of them, by chance."""
    return calls[int(torch.randint(len(calls), (), generator=generator))]


def shown(values: list[float]) -> str:
    """Mean and half the range of several seeds, 15 characters."""
    mean = statistics.fmean(values)
    if mean > 1e3:
        return f"{'∞':>15s}"
    spread = f" ± {(max(values) - min(values)) / 2:.3f}" if len(values) > 1 else ""
    return f"{f'{mean:.3f}{spread}':>15s}"
