"""How far a compressed cache could go: as many tokens as it holds, unrounded, chosen by age, by the attention that
they drew, and by that which they are going to draw.

    python benchmarks/quality/hindsight.py --model models/smollm2-135m --length 512 --length 2048 \\
        --text data/english-val.txt.gz --text data/books-val.txt.gz

The second row is what a memory does: what it has let go draws nothing any more, and never returns. The third lets
tokens go that never return either, but knows what all later queries attend to: a bound on what a better score would
bring. The last two have all tokens at hand and choose anew for every query, by what those before it attended to, and
by what it attends to itself: what a memory that can look again could have. What rounding costs is the distance of a
student's figure (``compressed.py --student even``) from the second row.

Scores are sums over queries of squared attention, those of the past decaying by a 64th a token, as in
:mod:`dofla.attention.coding.heavy_hitters`. Layers are of one size. KL(teacher ‖ student) of the next tokens, in nats.
A window of 2,048 tokens takes some minutes for each row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from positions import divergence
from rich.console import Console
from torch import Tensor, nn
from transformers import PreTrainedModel

import dofla
from dofla.attention.constants import DECAY
from dofla.compression.plan import compressed_plan
from dofla.compression.size import parse_size
from dofla.compression.target import Target
from dofla.data import TokenWindows
from dofla.display import table
from dofla.distillation.objective import Objective
from dofla.integration.interface import softmax_attention, visiting
from dofla.plans.layers import CompressedLayer
from dofla.runs.opening import open_original

Choice = Callable[[CompressedLayer, Tensor], Tensor]
"""Of masked scores [Hkv, G, queries, keys], which of the old tokens a query sees [Hkv, queries, keys]."""


def squares(scores: Tensor) -> Tensor:
    """Of attention, summed over the queries of a KV head [Hkv, queries, keys]."""
    return scores.softmax(-1).square().sum(1)


def newest(_: CompressedLayer, scores: Tensor) -> Tensor:
    """The later the better."""
    return torch.arange(scores.shape[-1], dtype=scores.dtype).expand_as(scores[:, 0])


def drawn_before(_: CompressedLayer, scores: Tensor) -> Tensor:
    """By the queries before each, of the original."""
    score, found = torch.zeros_like(scores[:, 0, 0]), []
    for row in squares(scores).unbind(1):
        found.append(score)
        score = score * (1 - 1 / DECAY) + row
    return torch.stack(found, 1)


def drawn_now(_: CompressedLayer, scores: Tensor) -> Tensor:
    """By each query itself."""
    return squares(scores)


def to_be_drawn(scores: Tensor) -> Tensor:
    """By each query and all after it."""
    return squares(scores).flip(1).cumsum(1).flip(1)


def anew(plan: CompressedLayer, scores: Tensor, worth: Callable[[CompressedLayer, Tensor], Tensor]) -> Tensor:
    """The tokens that are worth most as a query asks, whatever others saw."""
    old = old_enough(plan, scores.shape[-1])
    ranked = worth(plan, scores).masked_fill(~old, -torch.inf)
    chosen = ranked.topk(min(plan.heavy_hitters, scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(ranked, dtype=torch.bool).scatter_(-1, chosen, True) & old


def held(plan: CompressedLayer, scores: Tensor, foreseen: bool) -> Tensor:
    """What is left where, with each token that grows old, one goes for good: that which drew least from queries that
    saw it there, or, if the future is ``foreseen``, which is going to draw least from all."""
    heads, length, near = torch.arange(len(scores)), scores.shape[-1], near_tokens(plan)
    there, score = torch.zeros(len(scores), length, dtype=torch.bool), torch.zeros(len(scores), length)
    found = torch.zeros(len(scores), length, length, dtype=torch.bool)
    always, future = ~old_enough(plan, length), to_be_drawn(scores) if foreseen else None
    for query in range(length):
        if (entering := query - near) >= plan.sinks:
            there[:, entering] = True
            if entering - plan.sinks >= plan.heavy_hitters:
                least = (score if future is None else future[:, query]).masked_fill(~there, torch.inf)
                least[:, entering] = torch.inf
                there[heads, least.argmin(-1)] = False
        found[:, query] = there
        row = scores[:, :, query].masked_fill(~(there | always[query]).unsqueeze(1), -torch.inf)
        score = score * (1 - 1 / DECAY) + row.softmax(-1).square().sum(1)
    return found


CHOICES: dict[str, Choice] = {
    "by age": partial(anew, worth=newest),
    "by attention drawn while there": partial(held, foreseen=False),
    "by attention to be drawn": partial(held, foreseen=True),
    "anew, by attention drawn before": partial(anew, worth=drawn_before),
    "anew, by attention drawn now": partial(anew, worth=drawn_now),
}


def near_tokens(plan: CompressedLayer) -> int:
    """How many are there for their age."""
    return plan.window + plan.newest


def old_enough(plan: CompressedLayer, length: int) -> Tensor:
    """[queries, keys], which tokens are there only if they are chosen."""
    at = torch.arange(length)
    return (at.unsqueeze(1) - at >= near_tokens(plan)) & (at >= plan.sinks)


def limited(plans: dict[nn.Module, CompressedLayer], choice: Choice) -> Callable:
    """Softmax attention of what a memory of each layer's plan would hold."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: None,
        dropout: float,
        scaling: float,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        group, length = query.shape[1] // key.shape[1], key.shape[2]
        scores = (query.float().unflatten(1, (-1, group)) @ key.float().unsqueeze(2).mT * scaling)[0]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        chosen = choice(plans[module], scores.masked_fill(~causal, -torch.inf))
        visible = (chosen | ~old_enough(plans[module], length) & causal).repeat_interleave(group, 0).unsqueeze(0)
        hidden = torch.zeros_like(visible, dtype=query.dtype).masked_fill(~visible, -torch.inf)
        return softmax_attention(module, query, key, value, hidden, dropout, scaling, **kwargs)

    return attention


def forgetting(model: PreTrainedModel, plan: dofla.linear.Plan, windows: TokenWindows, choice: Choice) -> float:
    """Divergence from the model of the same whose layers see what a memory of ``plan`` would hold."""
    plans = {model.get_submodule(layer.name): layer for layer in plan.compressed}
    with visiting(model, None, limited(plans, choice)):
        return divergence(Objective(model, partial(visiting, model, None)), windows)


def main(
    model: Annotated[str, typer.Option(help="Folder or hub name of a causal model.")],
    text: Annotated[list[Path], typer.Option(help="Texts to judge on; repeatable.")],
    size: Annotated[str, typer.Option(help="Of the compressed cache.")] = "1.5MiB",
    length: Annotated[list[int] | None, typer.Option(help="Tokens per window; repeatable; default 512.")] = None,
    windows: Annotated[int, typer.Option(help="Of each text.")] = 6,
) -> None:
    teacher, tokenizer = open_original(model)
    plan = compressed_plan(Target.of(teacher), parse_size(size))
    names = {path.name.partition(".")[0]: path for path in text}
    shown = table("tokens", "chosen", *names, gap=2)
    for each in length or [512]:
        judged = [dofla.token_windows(path, tokenizer, length=each, windows=windows, split="all") for path in text]
        for name, choice in CHOICES.items():
            shown.add_row(str(each), name, *(f"{forgetting(teacher, plan, own, choice):.4f}" for own in judged))
    Console(width=120).print(shown)


if __name__ == "__main__":
    typer.run(main)
