"""Feature maps, ways to weigh the far past, and ways to split the bytes, on a few layers of a model: attention KL and
output error after a fit.

    python benchmarks/method/maps.py demo --budget 32
    python benchmarks/method/maps.py models/smollm2-135m --dtype bfloat16 --source data/english-train.txt.gz
    python benchmarks/method/maps.py models/smollm2-135m --dtype bfloat16 --source data/english-train.txt.gz \
        --length 2048 --parts 4 --row "mlp and exact" --row "mlp, far keys" --row "window and sinks"

The model runs once; what some of its layers see is kept, and every candidate is trained on that, some seconds a layer.
All candidates have the bytes of the same number of features per KV head; exact tokens are kept in eight bits.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from cached_layers import Calls, Layers, Model, Out, Source, collect, cost_of, drawn, optimise, shown
from far_past import Cosine, Decay, Gate, Taylor

from dofla.distillation.calibrate import calibrate_layer
from dofla.distillation.losses import LOSSES, output_errors
from dofla.feature_maps import mlp as mlp_file
from dofla.feature_maps.layer import LinearAttention
from dofla.integration.recorder import AttentionCall
from dofla.plans.hybrid import HeadCost, split


@dataclass(frozen=True)
class Candidate:
    """A layer: ``features`` are those that its state has and pays for, ``of_map`` (None: as many) those of its map."""

    feature_map: str
    features: int
    window: int = 0
    sinks: int = 0
    kind: type[LinearAttention] = LinearAttention
    of_map: int | None = None
    hidden: int = mlp_file.HIDDEN

    def layer(self, call: AttentionCall) -> LinearAttention:
        mlp_file.HIDDEN = self.hidden
        features = [self.of_map or self.features] * call.key.shape[1]
        return self.kind(self.feature_map, features, call.key.shape[-1], self.window, self.sinks, "int8")


def candidates(size: int, cost: HeadCost) -> dict[str, Candidate]:
    """What is compared, each of at most ``size`` bytes per KV head; what whole features leave goes to the window."""
    budget, (even, window, sinks) = size // cost.feature, split(size, cost)
    found = {}
    for title, features, exact in (("alone", budget, False), ("and exact tokens", even, True)):

        def add(name: str, what: str, used: int = features, exact: bool = exact, title: str = title, **rest) -> None:
            tokens = ((size - used * cost.feature) // cost.token - sinks, sinks) if exact else (0, 0)
            found[f"{what} {title}"] = Candidate(name, used, *tokens, **rest)

        for name in ("prf", "hedgehog", "t2r", "exponential", "mlp"):
            add(name, name)
        r, half = Taylor.dimensions(features), max(1, features // 2)
        if r >= 1:
            add("exponential", f"Taylor (r = {r})", 1 + r + r * (r + 1) // 2, kind=Taylor, of_map=r + 1)
        for name in ("t2r", "mlp"):
            add(name, f"{name} · cosine", 2 * half, kind=Cosine, of_map=half)
    for share in (0.5, 0.65, 0.85, 0.95):
        found[f"mlp, {share:.0%} of the bytes exact"] = Candidate("mlp", *split(size, cost, share))
    found["mlp of 128 hidden units"] = Candidate("mlp", even, window, sinks, hidden=128)
    found["mlp, far keys decay"] = Candidate("mlp", even, window, sinks, Decay)
    found["mlp, far keys gated"] = Candidate("mlp", even, window, sinks, Gate)
    found["window and sinks only"] = Candidate("none", 1, (size - cost.feature) // cost.token - 2, 2)
    return found


def main(
    model: Model = "demo",
    source: Source = "demo",
    length: int = 512,
    windows: int = 32,
    held_out: int = 4,
    layers: Layers = 7,
    budget: int = 64,
    steps: int = 150,
    rows: int = 64,
    seeds: int = 3,
    loss: str = "output",
    parts: Annotated[int, typer.Option(help="Of the windows, whose rows are also judged apart.")] = 1,
    row: Annotated[list[str] | None, typer.Option(help="Part of a candidate's name; default: all.")] = None,
    dtype: str | None = None,
    out: Out = None,
) -> None:
    calls, itemsize = collect(model, dtype, source, length, windows + held_out, layers)
    cost = cost_of(calls, itemsize)
    size = budget * cost.feature
    print(f"{model}, {len(calls)} layers, windows of {length}, {size} bytes per KV head, {steps} steps of one window")
    heads = "".join(f"{f'to {length * (n + 1) // parts}':>8s}" for n in range(parts)) if parts > 1 else ""
    print(f"{'':36s} {'M':>3s} {'w+s':>5s} {'attention KL':>15s} {'output error':>15s} {'s':>5s}{heads}")
    record = {}
    for title, candidate in candidates(size, cost).items():
        if row and not any(part in title for part in row):
            continue
        started = time.perf_counter()
        several = [_fit(calls, held_out, candidate, loss, steps, rows, seed, parts) for seed in range(seeds)]
        seconds = (time.perf_counter() - started) / seeds
        kl, error = (torch.stack([run[n] for run in several]) for n in (0, 1))  # [seeds, parts]
        tokens = candidate.window + candidate.sinks
        record[title] = {"features": candidate.features, "tokens": tokens, "kl": kl.tolist(), "error": error.tolist()}
        ends = "".join(f"{x:8.3f}" for x in error.mean(0)) if parts > 1 else ""
        of_seeds = [shown(x.mean(1).tolist()) for x in (kl, error)]
        print(
            f"{title:36s} {candidate.features:3d} {tokens:5d} {' '.join(of_seeds)} {seconds:5.0f}{ends}",
            flush=True,
        )
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _fit(
    calls: Calls, held_out: int, candidate: Candidate, loss: str, steps: int, rows: int, seed: int, parts: int
) -> torch.Tensor:
    """Attention KL and output error [2, parts], means over layers, after training the map of each."""
    errors = []
    for found in calls.values():
        training, judging = found[:-held_out], found[-held_out:]
        layer, generator = candidate.layer(training[0]), torch.Generator().manual_seed(seed)
        layer.reset_parameters(generator)
        calibrate_layer(training[0], layer, generator)

        def of_a_window(layer=layer, training=training, generator=generator) -> torch.Tensor:
            call = drawn(training, generator)
            return LOSSES[loss](call, call, layer, call.random_rows(rows, generator))

        optimise(layer, steps, of_a_window, layer.maps[0].betas)
        with torch.no_grad():
            errors += [_errors(call, layer, parts) for call in judging]
    return torch.stack(errors).mean(0)


def _errors(call: AttentionCall, layer: LinearAttention, parts: int) -> torch.Tensor:
    """Attention KL and output error of each part of the rows [2, parts]."""
    found = [output_errors(call, call, layer, rows) for rows in torch.arange(call.query.shape[-2]).chunk(parts)]
    return torch.tensor([[kl for kl, _ in found], [squares.sqrt() for _, squares in found]])


if __name__ == "__main__":
    typer.run(main)
