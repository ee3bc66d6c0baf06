"""How far a memory that fades could go: as many tokens as it holds, unrounded, chosen by age, by the attention that
they drew, and by that which they are going to draw.

    python benchmarks/quality/hindsight.py models/smollm2-135m --length 512 --length 2048 \\
        --text ../shared/data/english-val.txt.gz --text ../shared/data/books-val.txt.gz

No memory can choose in hindsight: the row is a bound on what a better score would bring, and what rounding costs is the
distance of a student's figure (``fading.py --student even``) from that of its own choice. Scores are sums over queries
of squared attention among all tokens, those of the past faded by a 64th a token, as in
:mod:`dofla.attention.coding.kept`. Layers are of one size. KL(teacher ‖ student) of the next tokens, in nats.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

import dofla
from dofla.attention.coding.kept import FADES
from dofla.data import TokenWindows
from dofla.display import table
from dofla.distillation.objective import Objective
from dofla.integration.checkpoint import load_model
from dofla.integration.fading import fading_plan
from dofla.integration.interface import RECORDING, softmax_attention, visiting
from dofla.integration.sites import attention_implementation
from dofla.plans.plan import LayerPlan

Score = Callable[[Tensor], Tensor]
"""Of attention drawn [H, queries, keys], each query's squares: what a key is worth to the memory when a query comes."""


def drawn(squares: Tensor) -> Tensor:
    """By the queries so far."""
    score, scores = torch.zeros_like(squares[:, 0]), []
    for row in squares.unbind(1):
        score = score * (1 - 1 / FADES) + row
        scores.append(score)
    return torch.stack(scores, 1)


def to_be_drawn(squares: Tensor) -> Tensor:
    """By the queries to come."""
    return squares.flip(1).cumsum(1).flip(1)


def newest(squares: Tensor) -> Tensor:
    """By age: the later the better."""
    return torch.arange(squares.shape[-1], dtype=squares.dtype, device=squares.device).expand_as(squares)


def most_attended(squares: Tensor) -> Tensor:
    """By this query alone, as if each had a memory of its own."""
    return squares


CHOICES: dict[str, Score] = {
    "by age": newest,
    "by attention drawn": drawn,
    "by attention to be drawn": to_be_drawn,
    "for each query its own": most_attended,
}


def seen(plan: LayerPlan, squares: Tensor, score: Score) -> Tensor:
    """[H, queries, keys], which tokens a query sees: sinks, the newest, and of all others those of the best score."""
    length = squares.shape[-1]
    at = torch.arange(length, device=squares.device)
    age = at.unsqueeze(1) - at
    near = plan.window + sum(count for count, _ in plan.stages)
    always = (age >= 0) & ((age < near) | (at < plan.sinks))
    open_to_all = (age >= near) & (at >= plan.sinks)
    ranked = score(squares).masked_fill(~open_to_all, -torch.inf)
    best = ranked.topk(min(plan.kept, length), dim=-1).indices
    return (torch.zeros_like(squares, dtype=torch.bool).scatter_(-1, best, True) & open_to_all) | always


def limited(plans: dict[nn.Module, LayerPlan], score: Score) -> Callable:
    """Softmax attention of what a memory of each layer's plan would hold."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        group = query.shape[1] // key.shape[1]
        scores = query.float().unflatten(1, (-1, group)) @ key.float().unsqueeze(2).mT * scaling  # [1, Hkv, G, L, L]
        causal = torch.ones_like(scores[0, 0, 0], dtype=torch.bool).tril()
        squares = scores.masked_fill(~causal, -torch.inf).softmax(-1).square().sum(2)[0]
        visible = seen(plans[module], squares, score).repeat_interleave(group, 0).unsqueeze(0)
        hidden = torch.zeros_like(visible, dtype=query.dtype).masked_fill(~visible, -torch.inf)
        return softmax_attention(module, query, key, value, hidden, scaling, **kwargs)

    return attention


@torch.inference_mode()
def divergence(model: PreTrainedModel, plan: dofla.Plan, windows: TokenWindows, score: Score) -> float:
    """Mean over the tokens, one window at a time."""
    plans = {model.get_submodule(layer.name): layer for layer in plan.layers}
    batches = [windows.batch([n]) for n in range(len(windows))]
    with attention_implementation(model, RECORDING), visiting(None, limited(plans, score)):
        loss = Objective(model, partial(visiting, None))
        count = sum(map(loss.count, batches))
        return sum(loss(batch, count, len(batches)).item() for batch in batches)


def main(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a causal model.")],
    text: Annotated[list[Path], typer.Option(help="Texts to judge on; repeatable.")],
    budget: Annotated[int, typer.Option(help="In features per KV head.")] = 64,
    length: Annotated[list[int] | None, typer.Option(help="Tokens per window; repeatable; default 512.")] = None,
    windows: Annotated[int, typer.Option(help="Of each text.")] = 6,
) -> None:
    teacher, tokenizer = load_model(model), AutoTokenizer.from_pretrained(model)
    plan = fading_plan(teacher, budget)
    names = {path.name.partition(".")[0]: path for path in text}
    shown = table("tokens", "chosen", *names, gap=2)
    for each in length or [512]:
        judged = [dofla.token_windows(path, tokenizer, length=each, windows=windows, split="all") for path in text]
        for name, score in CHOICES.items():
            shown.add_row(str(each), name, *(f"{divergence(teacher, plan, own, score):.4f}" for own in judged))
    Console(width=120).print(shown)


if __name__ == "__main__":
    typer.run(main)
