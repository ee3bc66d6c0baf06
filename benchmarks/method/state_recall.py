"""What states of the far past remember: n keys of a model's own, drawn at random, each with a random value; then each
key once more. Its value counts as recalled if the answer is nearest to it of all n."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from cached_layers import Calls, optimise
from delta_rule import Delta, Sum
from far_past import Decay, FarPast
from torch import Tensor, nn

from dofla.integration.recorder import AttentionCall
from dofla.plans.hybrid import HeadCost, split

PAIRS = (16, 32, 64, 128, 256, 512, 1024)
"""All but the last are trained on."""
QUARTERS = (64, 512)
"""Numbers of pairs of which recall is also shown by age."""
SKIPPED = 4
"""First keys of a window, which are like no others."""


class Recaller(nn.Module):
    """A state that is asked for the values of the keys it has seen."""

    learning_rates: ClassVar[dict[str, float]] = {"log_sharpness": 0.05}

    def __init__(self, state: Sum | Delta) -> None:
        super().__init__()
        self.state, self.log_sharpness = state, nn.Parameter(torch.tensor(3.0))

    def logits(self, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """How much the answer to each key [1, H, n, d] is like each of the values [1, H, n, dv]: [1, H, n, n]."""
        pairs = key.shape[-2]
        rows, far = torch.full((pairs,), pairs - 1), torch.ones(1, 1, pairs, pairs, dtype=torch.bool)
        out, _ = self.state.read(key, key, value, rows, far, scaling)
        return self.log_sharpness.exp() * F.normalize(out, dim=-1) @ value.mT


def recall_table(calls: Calls, size: int, cost: HeadCost, held_out: int, steps: int, seeds: int) -> dict:
    """Print it, for the features of a hybrid head of ``size`` bytes and for as many as these bytes hold; and return by
    state and number of pairs the share recalled of each quarter, oldest first."""
    whole, part = size // cost.feature, split(size, cost)[0]

    def summed(kind: type[FarPast]) -> Callable[[AttentionCall, int], Sum]:
        return lambda call, m: Sum(kind("mlp", [m] * call.key.shape[1], call.key.shape[-1]))

    states = {"sum": summed(FarPast), "sum, features decay": summed(Decay)}
    states["sum of signed features"] = lambda call, m: Delta(call, m, corrects=False)
    states["delta rule"] = lambda call, m: Delta(call, m)
    states["delta rule and decay"] = lambda call, m: Delta(call, m, decays=True)
    record = {}
    print(f"\n{'recall of n pairs; n =':32s}" + "".join(f"{n:>6d}" for n in PAIRS), end="")
    print("".join(f"   n = {n}, newest quarter first" for n in QUARTERS))
    for features in (part, whole):
        for title, make in states.items():
            several = [_recall(calls, make, features, held_out, steps, seed) for seed in range(seeds)]
            means = {n: torch.stack([found[n] for found in several]).mean(0) for n in PAIRS}  # by quarter
            record[f"{title}, {features} features"] = {n: quarters.tolist() for n, quarters in means.items()}
            line = "".join(f"{means[n].mean():6.2f}" for n in PAIRS)
            ages = "   ".join("".join(f"{x:7.2f}" for x in means[n].flip(0)) for n in QUARTERS)
            print(f"{f'{title}, {features} features':32s}{line} {ages}", flush=True)
    tokens = size // cost.token
    line = "".join(f"{min(1, tokens / n):6.2f}" for n in PAIRS)
    print(f"{f'the last {tokens} tokens, exactly':32s}{line}   (reckoned; the bytes of {whole} features)")
    return record


def _recall(
    calls: Calls,
    make: Callable[[AttentionCall, int], Sum | Delta],
    features: int,
    held_out: int,
    steps: int,
    seed: int,
) -> dict[int, Tensor]:
    """By number of pairs, the share recalled in each quarter of them, oldest first; means over layers and heads."""
    recalled: dict[int, list[Tensor]] = {n: [] for n in PAIRS}
    for found in calls.values():
        known = found[:-held_out]
        keys, others = (
            torch.cat([call.key[:, :, SKIPPED:] for call in some], dim=-2).float()
            for some in (known, found[-held_out:])
        )
        generator, first = torch.Generator().manual_seed(seed), replace(known[0], query=known[0].key)
        state = make(first, features)
        state.start(first, generator)
        recaller = Recaller(state)

        def draw(pool: Tensor, pairs: int, generator=generator) -> tuple[Tensor, Tensor]:
            chosen = torch.randperm(pool.shape[-2], generator=generator)[:pairs]
            values = torch.randn(*pool.shape[:2], pairs, pool.shape[-1], generator=generator)
            return pool[:, :, chosen], F.normalize(values, dim=-1)

        sizes = itertools.cycle(PAIRS[:-1])

        def loss(keys=keys, recaller=recaller, scaling=first.scaling, draw=draw, sizes=sizes) -> Tensor:
            logits = recaller.logits(*draw(keys, next(sizes)), scaling)
            return F.cross_entropy(logits.flatten(0, 2), torch.arange(logits.shape[-1]).repeat(logits.shape[1]))

        optimise(recaller, steps, loss)
        with torch.no_grad():
            for pairs, shares in recalled.items():
                right = recaller.logits(*draw(others, pairs), first.scaling).argmax(-1) == torch.arange(pairs)
                shares.append(right.float().mean((0, 1)).view(4, -1).mean(-1))
    return {n: torch.stack(shares).mean(0) for n, shares in recalled.items()}
