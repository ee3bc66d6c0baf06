"""How far a compressed cache could go: as many tokens as it holds, unrounded, chosen by age, by the attention that
they drew, and by that which they are going to draw.

    python benchmarks/quality/hindsight.py --model models/smollm2-135m --length 512 --length 2048 \\
        --text data/english-val.txt.gz --text data/books-val.txt.gz --facts data/books-val.txt.gz

The second row is what a memory does: what it has let go draws nothing any more, and never returns. The next four are
other rules: attention times the norm of the value; a quarter of the places for the largest values (VaSE, arXiv
2606.03928), the others by attention drawn or by chance; chance alone (arXiv 2609.03430). The next lets tokens go that
never return either, but knows what all later queries attend to: a bound on what a better score would bring. The last
two have all tokens at hand and choose anew for every query, by what those before it attended to, and by what it
attends to itself: what a memory that can look again could have. What rounding costs is the distance of a student's
figure (``compressed.py --student even``) from the second row.

Scores are sums over queries of squared attention, those of the past decaying by a 64th a token, as in
:mod:`dofla.attention.coding.heavy_hitters`. Layers are of one size. KL(teacher ‖ student) of the next tokens, in nats.
A row of a window of 2,048 tokens takes half a minute to a minute of a core with SmolLM2-135M.

With ``--facts``, how many facts told among a text are found again, too, by these rules, and by five that see the
whole prompt, choose as many tokens of it as the others hold, and keep these for good: by attention drawn while there,
and by the most attention that a second reading of the prompt pays (KVzip, arXiv 2505.23416), in each head or over all;
and by both, divided among heads as another text is over all.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from facts import facts_among, facts_found
from positions import divergence
from rich.console import Console
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import dofla
from dofla.attention.constants import DECAY
from dofla.compression.plan import compressed_plan
from dofla.compression.size import parse_size
from dofla.compression.target import Target
from dofla.data import TokenWindows
from dofla.data.facts import Facts
from dofla.display import table
from dofla.distillation.objective import Objective
from dofla.integration.interface import softmax_attention, visiting
from dofla.plans.layers import CompressedLayer
from dofla.runs.opening import open_original

Plans = dict[nn.Module, CompressedLayer]
Choice = Callable[[CompressedLayer, Tensor, Tensor], Tensor]
"""Of masked scores [Hkv, G, queries, keys] and norms of values [Hkv, keys], which tokens a query sees
[Hkv, queries, keys]."""
LARGE = 0.25
"""Of the places that are not for a token's age, those for the largest values, where a rule has some."""


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


def largest(scores: Tensor, count: int) -> Tensor:
    """Where the ``count`` largest of each row are."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(count).indices, True)


def anew(
    plan: CompressedLayer, scores: Tensor, _: Tensor, worth: Callable[[CompressedLayer, Tensor], Tensor]
) -> Tensor:
    """The tokens that are worth most as a query asks, whatever others saw."""
    old = old_enough(plan, scores.shape[-1])
    ranked = worth(plan, scores).masked_fill(~old, -torch.inf)
    chosen = largest(ranked, min(plan.heavy_hitters, scores.shape[-1]))
    return chosen & old | for_their_age(plan, scores.shape[-1])


def held(
    plan: CompressedLayer,
    scores: Tensor,
    norms: Tensor,
    foreseen: bool = False,
    by_chance: bool = False,
    weighed: bool = False,
    large: float = 0.0,
) -> Tensor:
    """What is left where, with each token that grows old, one goes for good: that which drew least from queries that
    saw it there, or, if the future is ``foreseen``, which is going to draw least from all, or any, ``by_chance``.

    What a token draws is ``weighed`` by the norm of its value, or not; a ``large`` part of the places is for the
    largest values."""
    heads, length, near = torch.arange(len(scores)), scores.shape[-1], near_tokens(plan)
    there, score = torch.zeros(len(scores), length, dtype=torch.bool), torch.zeros(len(scores), length)
    found = torch.zeros(len(scores), length, length, dtype=torch.bool)
    always, future = for_their_age(plan, length), to_be_drawn(scores) if foreseen else None
    weights, safe = norms.square() if weighed else 1, round(large * plan.heavy_hitters)
    for query in range(length):
        if (entering := query - near) >= plan.sinks:
            there[:, entering] = True
            if entering - plan.sinks >= plan.heavy_hitters:
                ranked = score if future is None else future[:, query]
                least = (torch.rand_like(score) if by_chance else ranked).masked_fill(~there, torch.inf)
                least[:, entering] = torch.inf
                least.scatter_(-1, norms.masked_fill(~there, -torch.inf).topk(safe).indices, torch.inf)
                there[heads, least.argmin(-1)] = False
        found[:, query] = there | always[query]
        row = scores[:, :, query].masked_fill(~found[:, query].unsqueeze(1), -torch.inf)
        score = score * (1 - 1 / DECAY) + row.softmax(-1).square().sum(1) * weights
    return found


CHOICES: dict[str, Choice] = {
    "by age": partial(anew, worth=newest),
    "by attention drawn while there": held,
    "by attention drawn, times the value": partial(held, weighed=True),
    "by attention drawn, large values stay": partial(held, large=LARGE),
    "by chance": partial(held, by_chance=True),
    "by chance, large values stay": partial(held, by_chance=True, large=LARGE),
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


def for_their_age(plan: CompressedLayer, length: int) -> Tensor:
    """[queries, keys], which tokens are there without being chosen."""
    return ~old_enough(plan, length) & causal(length)


def causal(length: int) -> Tensor:
    """[queries, keys], all tokens up to each query's own."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def products(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Masked scores of the one window of a batch [Hkv, G, queries, keys]."""
    scores = (query.float().unflatten(1, (key.shape[1], -1)) @ key.float().unsqueeze(2).mT * scaling)[0]
    return scores.masked_fill_(~causal(key.shape[2])[-query.shape[2] :], -torch.inf)


def limited(plans: Plans, choice: Choice) -> Callable:
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
        seen = choice(plans[module], products(query, key, scaling), value[0].float().norm(dim=-1))
        visible = seen.repeat_interleave(query.shape[1] // key.shape[1], 0).unsqueeze(0)
        hidden = torch.zeros_like(visible, dtype=query.dtype).masked_fill(~visible, -torch.inf)
        return softmax_attention(module, query, key, value, hidden, dropout, scaling, **kwargs)

    return attention


def forgetting(model: PreTrainedModel, plans: Plans, windows: TokenWindows, choice: Choice, seed: int) -> float:
    """Divergence from the model of the same whose layers see what a memory of their plans would hold."""
    torch.manual_seed(seed)
    with visiting(model, None, limited(plans, choice)):
        return divergence(Objective(model, partial(visiting, model, None)), windows)


def after_prompt(
    plan: CompressedLayer, scores: Tensor, norms: Tensor, prompt: int, chosen: Callable[..., Tensor]
) -> Tensor:
    """All tokens in a prompt; after it what is ``chosen`` of it [Hkv, prompt], and all that came since."""
    seen = causal(scores.shape[-1]).repeat(len(scores), 1, 1)
    seen[:, prompt:, :prompt] = chosen(plan, scores[..., :prompt, :prompt], norms[:, :prompt]).unsqueeze(1)
    return seen


def held_at_end(plan: CompressedLayer, scores: Tensor, norms: Tensor) -> Tensor:
    """What a memory holds at the end of a prompt."""
    return held(plan, scores, norms)[:, -1]


def read_again(model: PreTrainedModel, plans: Plans, prompt: Tensor) -> Tensor:
    """The most attention that a query of a second reading of the prompt pays to each token of the first [layers, Hkv,
    prompt]: the prompt stands behind itself."""
    drawn = {}

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *given, scaling: float, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        again = products(query[:, :, len(prompt) :], key, scaling).softmax(-1)
        drawn[module] = again[..., : len(prompt)].amax((1, 2))
        return softmax_attention(module, query, key, value, *given, scaling=scaling, **kwargs)

    with torch.no_grad(), visiting(model, None, attention):
        model.base_model(prompt.repeat(2).unsqueeze(0), use_cache=False)
    return torch.stack([drawn[module] for module in plans])


def best_over_all(scores: Tensor, tokens: int) -> Tensor:
    """Where the best of all heads are, so many ``tokens`` a head in the mean [layers, Hkv, n]."""
    return largest(scores.flatten(), tokens * scores[..., 0].numel()).view_as(scores)


def best_of_each(scores: Tensor, counts: Tensor) -> Tensor:
    """Where the best of each head are [..., n], of each as many as ``counts`` says."""
    return scores.argsort(-1, descending=True).argsort(-1) < counts.unsqueeze(-1)


def prompt_choices(model: PreTrainedModel, plans: Plans, prompt: Tensor, other: Tensor) -> dict[str, Choice]:
    """Rules that see the whole prompt before they choose for good; heads divide tokens as they do in it, or in another
    text."""
    scores, slots = read_again(model, plans, prompt), sum(next(iter(plans.values())).sizes[0])
    in_heads, over_all = largest(scores, slots), best_over_all(scores, slots)
    counts = best_over_all(read_again(model, plans, other), slots * len(other) // len(prompt)).float().mean(-1)
    counts = counts * len(prompt)
    divided, place = best_of_each(scores, counts), {plan.name: n for n, plan in enumerate(plans.values())}
    rules: dict[str, Callable[..., Tensor]] = {
        "whole prompt, by attention drawn": held_at_end,
        "whole prompt, by attention drawn, divided as another text": lambda plan, scores, _: best_of_each(
            squares(scores).sum(1), counts[place[plan.name]]
        ),
        "prompt read again, in each head": lambda plan, *_: in_heads[place[plan.name]],
        "prompt read again, over all heads": lambda plan, *_: over_all[place[plan.name]],
        "prompt read again, divided as another text": lambda plan, *_: divided[place[plan.name]],
    }
    return {name: partial(after_prompt, prompt=len(prompt), chosen=rule) for name, rule in rules.items()}


def facts_again(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, plans: Plans, facts: Facts, only: str, seed: int
) -> dict[str, tuple[int, int]]:
    """Of the facts of one document, how many are found by each rule, and all."""
    found = {"all tokens": facts_found(model, facts, tokenizer)}
    prompt = facts.documents.input_ids[0, : -facts.asked]
    other = dofla.token_windows("sample", tokenizer=tokenizer, length=len(prompt), windows=1).input_ids[0]
    choices = CHOICES | prompt_choices(model, plans, prompt, other)
    for name, choice in matching(choices, only).items():
        torch.manual_seed(seed)
        with visiting(model, None, limited(plans, choice)):
            found[name] = facts_found(model, facts, tokenizer)
    return found


def matching(choices: dict[str, Choice], only: str) -> dict[str, Choice]:
    """Those whose names match a regular expression."""
    return {name: choice for name, choice in choices.items() if re.search(only, name)}


def main(
    model: Annotated[str, typer.Option(help="Folder or hub name of a causal model.")],
    text: Annotated[list[Path] | None, typer.Option(help="Texts to judge on; repeatable.")] = None,
    facts: Annotated[Path | None, typer.Option(help="A text among which facts are told.")] = None,
    size: Annotated[str, typer.Option(help="Of the compressed cache.")] = "1.5MiB",
    length: Annotated[list[int] | None, typer.Option(help="Tokens per window; repeatable; default 512.")] = None,
    windows: Annotated[int, typer.Option(help="Of each text.")] = 6,
    only: Annotated[str, typer.Option(help="Rows whose names match this regular expression.")] = "",
    seed: Annotated[int, typer.Option(help="Of chance.")] = 0,
) -> None:
    teacher, tokenizer = open_original(model)
    plan = compressed_plan(Target.of(teacher), parse_size(size))
    plans = {teacher.get_submodule(layer.name): layer for layer in plan.compressed}
    names = {path.name.partition(".")[0]: path for path in text or []}
    for each in length or [512]:
        read = partial(dofla.token_windows, tokenizer=tokenizer, split="all")
        if names:
            judged = [read(path, length=each, windows=windows) for path in names.values()]
            shown = table("tokens", "chosen", *names, gap=2)
            for name, choice in matching(CHOICES, only).items():
                shown.add_row(
                    str(each), name, *(f"{forgetting(teacher, plans, own, choice, seed):.4f}" for own in judged)
                )
            Console(width=120).print(shown)
        if facts:
            among = facts_among(str(facts), tokenizer, each)
            shown = table("tokens", "chosen", "facts found", "of", gap=2)
            for name, counts in facts_again(teacher, tokenizer, plans, among, only, seed).items():
                shown.add_row(str(each), name, *map(str, counts))
            Console(width=120).print(shown)


if __name__ == "__main__":
    typer.run(main)
