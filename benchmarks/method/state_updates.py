"""Ways to write to the state of the far past: sums, sums that decay, and the delta rule, on a few layers of a model.

    python benchmarks/method/state_updates.py demo --budget 32
    python benchmarks/method/state_updates.py models/smollm2-135m --dtype bfloat16 \
        --source data/english-train.txt.gz

The first table has the error of the layer's output, all states having the same bytes. The second asks for what a state
remembers: n keys of the model's own, drawn at random, each with a random value; then each key once more, and its value
counts as recalled if the answer is nearest to it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from cached_layers import Calls, Layers, Model, Out, Source, collect, cost_of, drawn, optimise, shown
from delta_rule import Delta, Sum
from far_past import Decay, FarPast
from state_recall import recall_table
from torch import Tensor, nn

from dofla.attention import LOG_ZERO, exact_scores, rounded
from dofla.attention.exact import merge
from dofla.integration.recorder import AttentionCall
from dofla.plans.hybrid import HeadCost, split


class FarPart(nn.Module):
    """A state, where its mass comes from, and the exact tokens it stands beside.

    ``mass`` is ``own`` (a sum's); ``beside``: of as many positive features that hold nothing else; ``query``: guessed
    from the query and the number of far keys alone; or ``true``: the teacher's, which no state knows.
    """

    def __init__(self, state: Sum | Delta, mass: str, frame: FarPast) -> None:
        super().__init__()
        self.state, self.mass, self.frame = state, mass, frame

    def start(self, call: AttentionCall, generator: torch.Generator) -> None:
        Sum(self.frame).start(call, generator)
        if isinstance(self.state, Delta):
            self.state.start(call, generator)

    def errors(self, call: AttentionCall, rows: Tensor) -> tuple[Tensor, Tensor]:
        """KL of the share of far keys, and the relative squared error of the output, means over heads."""
        share = call.query.shape[1] // call.key.shape[1]
        near = self.frame.seen_exactly(rows, call.key.shape[-2], share=share, weight=None, causal=True)
        visible = ~call.hidden(rows)
        near, far = near & visible, ~near & visible
        query, key, value = call.query[:, :, rows].float(), rounded(call.key), rounded(call.value).float()
        true = exact_scores(query, call.key, call.scaling)
        true_near, true_far = (true.masked_fill(~seen, LOG_ZERO).logsumexp(-1) for seen in (near, far))
        weights = torch.softmax(true.masked_fill(~visible, LOG_ZERO), -1)
        wanted = weights @ call.value.float().repeat_interleave(share, 1)
        scores = exact_scores(query, key, call.scaling).masked_fill(~near, LOG_ZERO)
        exact = torch.softmax(scores, -1) @ value.repeat_interleave(share, 1)
        out, mass = self.state.read(query, key, value, rows, far, call.scaling)
        if self.mass == "true":
            mass = true_far
        elif self.mass == "beside":
            mass = self.frame.far_scores(query, key, rows, call.scaling).masked_fill(~far, LOG_ZERO).logsumexp(-1)
        elif self.mass == "query":
            guess = self.frame.maps[0].log_query(query, call.scaling).logsumexp(-1)
            level = self.frame.maps[0].log_scale.repeat_interleave(share, 0)
            mass = torch.where(far.any(-1), guess + level + far.sum(-1).clamp_min(1).log(), LOG_ZERO)
        found, _ = merge((exact, scores.logsumexp(-1)), (out, mass))
        error = (found - wanted).square().sum((0, 2, 3)) / wanted.square().sum((0, 2, 3))
        both = far.any(-1) & near.any(-1)
        shares = _log_shares(true_near, true_far), _log_shares(scores.logsumexp(-1), mass)
        kl = (shares[0].exp() * (shares[0] - shares[1])).sum(-1) * both
        return kl.mean(), error.mean()


def _log_shares(near: Tensor, far: Tensor) -> Tensor:
    return torch.log_softmax(torch.stack([near, far], -1), -1)


Make = Callable[[AttentionCall], FarPart]


def far_parts(size: int, cost: HeadCost) -> dict[str, Make]:
    """What is compared on layers, each of ``size`` bytes per KV head. A feature of a sum has a log-mass of two numbers
    beside its mean value; so M features of a delta rule and the mass of M positive features cost as much."""
    features, window, sinks = split(size, cost)

    def layer(call: AttentionCall, kind: type[FarPast] = FarPast, alone: bool = False) -> FarPast:
        tokens = (0, 0) if alone else (window, sinks)
        of_map = [size // cost.feature if alone else features] * call.key.shape[1]
        return kind("mlp", of_map, call.key.shape[-1], *tokens, "int8")

    def summed(kind: type[FarPast] = FarPast, mass: str = "own", alone: bool = False) -> Make:
        def make(call: AttentionCall) -> FarPart:
            frame = layer(call, kind, alone)
            return FarPart(Sum(frame), mass, frame)

        return make

    def delta(mass: str, alone: bool = False, **options: bool) -> Make:
        def make(call: AttentionCall) -> FarPart:
            number = size // (4 * call.value.shape[-1]) if alone else features
            return FarPart(Delta(call, number, **options), mass, layer(call, alone=alone))

        return make

    return {
        "sum (the default)": summed(),
        "sum, features decay": summed(Decay),
        "sum, true mass": summed(mass="true"),
        "delta rule, mass beside": delta("beside"),
        "delta rule, β of the head, mass beside": delta("beside", per_token=False),
        "delta rule and decay, mass beside": delta("beside", decays=True),
        "delta rule, mass from the query": delta("query"),
        "delta rule, true mass": delta("true"),
        "alone: sum": summed(alone=True),
        "alone: sum, features decay": summed(Decay, alone=True),
        "alone: delta rule": delta("true", alone=True),
        "alone: delta rule and decay": delta("true", alone=True, decays=True),
    }


def main(
    model: Model = "demo",
    source: Source = "demo",
    length: int = 512,
    windows: int = 16,
    held_out: int = 4,
    layers: Layers = 4,
    budget: int = 64,
    steps: int = 80,
    rows: int = 64,
    seeds: int = 2,
    row: Annotated[list[str] | None, typer.Option(help="Name of a state of the first table; default: all.")] = None,
    recall: Annotated[bool, typer.Option(help="The second table as well.")] = True,
    dtype: str | None = None,
    out: Out = None,
) -> None:
    calls, itemsize = collect(model, dtype, source, length, windows + held_out, layers)
    cost = cost_of(calls, itemsize)
    size = budget * cost.feature
    print(f"{model}, {len(calls)} layers, {size} bytes per KV head, {steps} steps")
    print(f"{'':40s} {'KL of far share':>15s} {'output error':>15s}")
    record: dict[str, dict] = {"layers": {}}
    for title, make in far_parts(size, cost).items():
        if row and title not in row:
            continue
        several = [_fit(calls, make, held_out, steps, rows, seed) for seed in range(seeds)]
        record["layers"][title] = several
        print(f"{title:40s} {' '.join(shown(list(x)) for x in zip(*several, strict=True))}", flush=True)
    if recall:
        record["recall"] = recall_table(calls, size, cost, held_out, steps, seeds)
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _fit(calls: Calls, make: Make, held_out: int, steps: int, rows: int, seed: int) -> list[float]:
    """KL of the far share and output error, means over layers, after training each on the sum of the two."""
    errors = []
    for found in calls.values():
        known, judging = found[:-held_out], found[-held_out:]
        part, generator = make(known[0]), torch.Generator().manual_seed(seed)
        part.start(known[0], generator)

        def loss(part=part, known=known, generator=generator) -> Tensor:
            call = drawn(known, generator)
            return sum(part.errors(call, call.random_rows(rows, generator)))

        optimise(part, steps, loss)
        with torch.no_grad():
            for call in judging:
                kl, error = part.errors(call, torch.arange(call.query.shape[-2]))
                errors.append((kl.item(), error.sqrt().item()))
    return [statistics.fmean(column) for column in zip(*errors, strict=True)]


if __name__ == "__main__":
    typer.run(main)
