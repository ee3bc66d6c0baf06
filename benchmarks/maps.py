"""Feature maps, and ways to split the bytes, on a few layers of a model: attention KL and output error after a fit.

    python benchmarks/maps.py demo
    python benchmarks/maps.py models/smollm2-135m --dtype bfloat16 --source ../shared/data/english-train.txt.gz

The model runs once; what some of its layers see is kept, and every candidate is trained on that, half a minute each.
All candidates have the bytes of the same number of features per KV head.
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # this folder, whose profile.py would hide the standard library's

import json
import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from dofla.distill import SCHEDULES
from dofla.distill.calibrate import calibrate_layer
from dofla.distill.losses import LOSSES, output_errors
from dofla.feature_maps import FEATURE_MAPS
from dofla.feature_maps import mlp as mlp_file
from dofla.hybrid import TOKEN_SHARE, HeadCost, split
from dofla.integration.recorder import AttentionCall, recording, run_body
from dofla.integration.sites import attention_sites, evaluation_mode
from dofla.layer import LinearAttention
from dofla.recipe import DataSpec
from dofla.teacher import load_teacher, windows_of

Calls = dict[str, list[AttentionCall]]


def main(
    model: Annotated[str, typer.Argument(help="Folder, hub name or demo.")] = "demo",
    source: Annotated[str, typer.Option(help="Text, as data.source of a recipe.")] = "demo",
    length: int = 512,
    windows: int = 32,
    held_out: int = 4,
    layers: Annotated[int, typer.Option(help="How many, evenly spread over the depth.")] = 7,
    budget: int = 64,
    steps: int = 300,
    rows: int = 64,
    seeds: int = 3,
    dtype: str | None = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    calls, itemsize = _collect(model, dtype, source, length, windows + held_out, layers)
    first = next(iter(calls.values()))[0]
    cost = HeadCost.of(first.key.shape[-1], first.value.shape[-1], itemsize)
    size = budget * cost.feature
    candidates = {f"{name}, features only": (name, budget, 0, 0) for name in ("prf", "hedgehog", "t2r", "exponential")}
    candidates["mlp, features only"] = ("mlp", budget, 0, 0)
    for name in ("prf", "hedgehog", "exponential", "mlp"):
        candidates[f"{name}, {TOKEN_SHARE:.0%} exact tokens"] = (name, *split(size, cost))
    for share in (0.25, 0.5, 0.65, 0.85, 0.95):
        candidates[f"mlp, {share:.0%} exact tokens"] = ("mlp", *split(size, cost, share))
    candidates["mlp of 128 hidden units"] = ("mlp", *split(size, cost))
    tokens = (size - cost.feature) // cost.token
    candidates["window and sinks only"] = ("none", 1, tokens - 2, 2)
    print(f"{model}, {len(calls)} layers, {size} bytes per KV head, {steps} steps of one window and {rows} rows")
    print(f"{'map':32s} {'M':>4s} {'w+s':>5s} {'attention KL':>15s} {'output error':>15s} {'s':>5s}")
    record = {}
    for title, (name, *shape) in candidates.items():
        mlp_file.HIDDEN = 128 if "128" in title else 32
        started = time.perf_counter()
        several = [
            _fit(calls, held_out, name, *shape, steps, rows, seed)
            for seed in range(seeds if FEATURE_MAPS[name].learning_rates else 1)
        ]
        seconds = (time.perf_counter() - started) / len(several)
        kl, error = ([run[n] for run in several] for n in (0, 1))
        record[title] = {"features": shape[0], "tokens": shape[1] + shape[2], "kl": kl, "output_error": error}
        print(
            f"{title:32s} {shape[0]:4d} {shape[1] + shape[2]:5d} {_shown(kl)} {_shown(error)} {seconds:5.0f}",
            flush=True,
        )
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _collect(model: str, dtype: str | None, source: str, length: int, windows: int, layers: int) -> tuple[Calls, int]:
    teacher, tokenizer = load_teacher(model, dtype)
    text = windows_of(DataSpec(source, length, windows), teacher, tokenizer, seed=0)
    names = list(attention_sites(teacher))
    places = {round(n * (len(names) - 1) / max(layers - 1, 1)) for n in range(layers)}
    calls: Calls = {names[place]: [] for place in sorted(places)}
    with evaluation_mode(teacher), recording(teacher, calls, lambda c: calls[c.name].append(c)), torch.inference_mode():
        for n in range(windows):
            run_body(teacher, text.batch([n]))
    return calls, teacher.dtype.itemsize


def _fit(
    calls: Calls, held_out: int, name: str, features: int, window: int, sinks: int, steps: int, rows: int, seed: int
) -> tuple[float, float]:
    """Attention KL and output error, means over layers, after training the map of each."""
    errors = []
    for found in calls.values():
        training, judging = found[:-held_out], found[-held_out:]
        kv_heads, head_dim = training[0].key.shape[1], training[0].key.shape[-1]
        layer = LinearAttention(name, [features] * kv_heads, head_dim, window, sinks)
        generator = torch.Generator().manual_seed(seed)
        layer.reset_parameters(generator)
        calibrate_layer(training[0], layer, generator)
        _train(layer, training, steps, rows, generator)
        with torch.no_grad():
            errors.append([statistics.fmean(pair) for pair in zip(*(_errors(x, layer) for x in judging), strict=True)])
    return tuple(statistics.fmean(column) for column in zip(*errors, strict=True))


def _train(
    layer: LinearAttention, training: list[AttentionCall], steps: int, rows: int, generator: torch.Generator
) -> None:
    rates = layer.maps[0].learning_rates
    groups = [{"params": [p], "lr": rates[n], "start": rates[n]} for n, p in layer.maps[0].named_parameters()]
    if not groups:
        return
    optimizer = torch.optim.Adam(groups, betas=layer.maps[0].betas)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = group["start"] * SCHEDULES["cosine"](step / steps)
        call = training[int(torch.randint(len(training), (), generator=generator))]
        optimizer.zero_grad()
        LOSSES["softmax"](call, call, layer, call.random_rows(rows, generator)).backward()
        optimizer.step()


def _errors(call: AttentionCall, layer: LinearAttention) -> tuple[float, float]:
    rows = torch.arange(call.query.shape[-2])
    kl, squares = output_errors(call, call, layer, rows)
    return kl.item(), squares.sqrt().item()


def _shown(values: list[float]) -> str:
    mean = statistics.fmean(values)
    if mean > 1e3:
        return f"{'∞':>15s}"
    spread = f" ± {(max(values) - min(values)) / 2:.3f}" if len(values) > 1 else ""
    return f"{f'{mean:.3f}{spread}':>15s}"


if __name__ == "__main__":
    typer.run(main)
