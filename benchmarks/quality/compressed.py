"""What a compressed cache keeps without training, on several kinds of text, beside a window of the same bytes, one
whose tokens all go by their age, one whose layers are all of one size, and one with features for what it forgets.

    python benchmarks/quality/compressed.py --model models/smollm2-135m \\
        --calibrate data/english-train.txt.gz \\
        --text data/english-val.txt.gz --text data/stories-val.txt.gz \\
        --text data/books-val.txt.gz --windows 24
    python benchmarks/quality/compressed.py --model models/smollm2-135m --student trained --length 512 --length 2048 ...
    python benchmarks/quality/compressed.py --model models/smollm2-135m \\
        --student trained --trained-length 2048 --rate 3e-4 ...

Python source, the modules of the standard library of the interpreter that runs this, is always among the texts. A gap
is the mean over windows, with an interval of 95 % by bootstrap; with several seeds, directions and head budgets are
measured on other windows each time, and the spread is half the range of the means. Behind it stands KL(teacher ‖
student) of the next-token distributions, which chance moves less. Each loss increase is said as soon as it is known,
the table at the end; with --out all is written as JSON too.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from dofla.integration.compressed import compressed_plan, feature_bytes
from dofla.integration.directions import measure_directions
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import dofla
from dofla.attention import tier_bytes
from dofla.data import TokenWindows
from dofla.display import size, table
from dofla.evaluation.language import next_token_figures
from dofla.evaluation.verdict import perplexity
from dofla.integration.recorder import evaluation_mode
from dofla.integration.sites import attention_sites
from dofla.integration.student import Student
from dofla.plans.hybrid import FEATURE_MAP, SINKS, HeadCost
from dofla.runs.teacher import load_teacher
from dofla.storage.files import write_json

Make = Callable[[PreTrainedModel, TokenWindows, TokenWindows | None], PreTrainedModel]
Figures = dict[str, float | list[float]]


def window_alone(budget: int, _: int | None) -> Make:
    """A window and sinks in eight bits, of the bytes of so many features per KV head."""

    def make(model: PreTrainedModel, *_: object) -> PreTrainedModel:
        layers = []
        for site in attention_sites(model).values():
            cost = HeadCost.of(site.head_dim, site.value_dim, model.dtype.itemsize, "int8")
            window = budget * cost.feature // cost.token - SINKS
            shape = (site.name, site.kv_heads, site.head_dim, site.value_dim)
            layers.append(dofla.LayerPlan(*shape, 0, window, SINKS, "none", "int8"))
        return dofla.linearize(model, dofla.Plan(layers))

    return make


def compressed(budget: int, context: int | None, head_budgets: str | dofla.HeadBudgets = "measured") -> Make:
    """:func:`dofla.compress`."""
    options = {"context": context, "head_budgets": head_budgets}
    return lambda model, tokens, _: dofla.compress(model, tokens, budget * feature_bytes(model), **options)


def even(budget: int, context: int | None) -> Make:
    """:func:`dofla.compress` with the same size for all layers."""
    return compressed(budget, context, "even")


def by_age(budget: int, context: int | None) -> Make:
    """:func:`even` with no token kept for the attention it draws, and more that are there for their age."""

    def make(model: PreTrainedModel, tokens: TokenWindows, _: object) -> PreTrainedModel:
        plan = compressed_plan(model, budget)
        for layer in plan.layers:
            before = layer.state_bytes(model.dtype.itemsize)
            layer.tiers, layer.heavy_hitters = layer.coded_per_head[0], 0
            spare = before - layer.state_bytes(model.dtype.itemsize)
            per_token = tier_bytes(layer.head_dim, layer.value_dim, layer.tiers[-1][1])
            layer.tiers[-1][0] += spare // (layer.kv_heads * per_token)
        student = dofla.linearize(model, plan)
        measure_directions(Student.of(student), tokens, context=context)
        return student

    return make


def retrieval(
    budget: int, context: int | None, heads: int = 8, tokenizer: PreTrainedTokenizerBase | None = None
) -> Make:
    """:func:`compressed`, with so many KV heads that hold every token of ``context``."""
    options = {"context": context, "retrieval_heads": heads, "tokenizer": tokenizer}
    return lambda model, tokens, _: dofla.compress(model, tokens, budget * feature_bytes(model), **options)


def features(budget: int, context: int | None) -> Make:
    """:func:`compressed` with an eighth of the bytes for features, which sum up what is forgotten: trained layer by
    layer, on the text that it was measured on."""

    def make(model: PreTrainedModel, tokens: TokenWindows, training: TokenWindows) -> PreTrainedModel:
        behind = max(1, budget // 8)
        size = (budget - behind) * feature_bytes(model)
        head_budgets = dofla.measure_head_budgets(model, tokens, size, context=context)
        plan = compressed_plan(model, budget - behind, head_budgets=head_budgets, context=context)
        for layer in plan.layers:
            layer.features, layer.feature_map = behind, FEATURE_MAP
        student = dofla.linearize(model, plan)
        measure_directions(Student.of(student), tokens, context=context)
        dofla.distill(student, training, batch_size=1, context=context)
        return student

    return make


def trained(budget: int, context: int | None, rate: float | None = None) -> Make:
    """:func:`dofla.compress`, and then end to end, :data:`AT_ONCE` tokens a step, on the text that it was measured
    on."""

    def make(model: PreTrainedModel, tokens: TokenWindows, training: TokenWindows) -> PreTrainedModel:
        student = dofla.compress(model, tokens, budget * feature_bytes(model), context=context)
        size = max(1, AT_ONCE // training.length)
        options = {"steps": len(training) // size, "batch_size": size, "context": context}
        rates = {} if rate is None else {"weights": rate}
        dofla.distill_end_to_end(student, training, learning_rates=rates, **options)
        return student

    return make


STUDENTS = {"window": window_alone, "by-age": by_age, "even": even, "compressed": compressed, "features": features}
STUDENTS |= {"trained": trained, "retrieval": retrieval}
MEASURED = 12
"""Windows that students are measured on."""
TRAINED, AT_ONCE = 120 * 512, 2 * 512
"""Tokens that they are trained on, and of a step, one window at least."""


def sources(paths: list[Path]) -> dict[str, object]:
    """Name → what token_windows takes."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return {path.name.partition(".")[0]: path for path in paths} | {"python": modules}


def main(
    model: Annotated[str, typer.Option(help="Folder or hub name of a causal model.")],
    calibrate: Annotated[
        str, typer.Option(help="Text to measure directions and head budgets on; self: the model's own.")
    ],
    text: Annotated[list[Path] | None, typer.Option(help="Texts to judge on; repeatable.")] = None,
    budget: Annotated[list[int] | None, typer.Option(help="In features per KV head; repeatable; default 64.")] = None,
    length: Annotated[list[int] | None, typer.Option(help="Tokens per window; repeatable; default 512.")] = None,
    windows: Annotated[int, typer.Option(help="Of each text; beyond 512 tokens a third.")] = 24,
    seeds: Annotated[int, typer.Option(help="Draws of the windows that students are made from.")] = 1,
    student: Annotated[
        list[str] | None,
        typer.Option(help="Of " + ", ".join(STUDENTS) + "; repeatable; default window and compressed."),
    ] = None,
    measured_length: Annotated[int, typer.Option(help="Tokens of the windows that students are made from.")] = 512,
    trained_length: Annotated[int, typer.Option(help="Of those that they are trained on; as many in all.")] = 512,
    rate: Annotated[float | None, typer.Option(help="Learning rate of weights, instead of the default.")] = None,
    head_budgets: Annotated[
        Path | None, typer.Option(help="Saved head budgets of the student compressed; default measured again.")
    ] = None,
    context: Annotated[int | None, typer.Option(help="Positions to read these among; default all there are.")] = None,
    retrieval_heads: Annotated[int, typer.Option(help="Of the student of that name, which hold every token.")] = 8,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Default the checkpoint's, where that is not slow.")] = None,
) -> None:
    names = student or ["window", "compressed"]
    if unknown := set(names) - STUDENTS.keys():
        raise typer.BadParameter(f"no student is called {min(unknown)!r}: choose of {', '.join(STUDENTS)}")
    teacher, tokenizer = load_teacher(model, dtype)
    texts, lengths = sources(text or []), length or [512]
    judged = {
        (tokens, kind): _windows(where, tokenizer, tokens, windows)
        for tokens, (kind, where) in product(lengths, texts.items())
    }
    students = STUDENTS | {
        "compressed": partial(
            compressed, head_budgets=dofla.HeadBudgets.load(head_budgets) if head_budgets else "measured"
        ),
        "trained": partial(trained, rate=rate),
        "retrieval": partial(retrieval, heads=retrieval_heads, tokenizer=tokenizer),
    }
    pools = [_pool(calibrate, tokenizer, teacher, measured_length, MEASURED, seeds), [None] * seeds]
    if {"trained", "features"} & set(names):
        pools[1] = _pool(calibrate, tokenizer, teacher, trained_length, TRAINED // trained_length, seeds)
    columns = ["student", "tokens", "state", *texts, "mean, perplexity", "made in"]
    shown, rows = table(*columns, gap=2), []
    for each, name in product(budget or [64], names):
        found: dict[tuple[int, str], list[Figures]] = {}
        for seed in range(1 if name == "window" else seeds):
            started = time.perf_counter()
            made = students[name](each, context)(teacher, *(pool[seed] for pool in pools))
            seconds = time.perf_counter() - started
            state = Student.of(made).plan.state_bytes(teacher.dtype)
            with evaluation_mode(made):
                for (tokens, kind), held_out in judged.items():
                    figures = next_token_figures(made, held_out)
                    typer.echo(f"{name}, {each}, seed {seed}: {kind}, {tokens} tokens: {_cell([figures])}", err=True)
                    found.setdefault((tokens, kind), []).append(figures)
            dofla.restore(made)
        for tokens in lengths:
            by_kind = {kind: found[tokens, kind] for kind in texts}
            row = {"student": name, "budget": each, "bytes": state, "length": tokens, "texts": by_kind}
            cells = [*map(_cell, by_kind.values()), _mean_cell(by_kind.values())]
            rows.append(row)
            shown.add_row(f"{name}, {each}", str(tokens), size(state), *cells, f"{seconds:.0f} s")
        if out is not None:
            write_json(out, {"rows": rows})
    Console(width=200).print(shown)


def _pool(
    text: str, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, length: int, count: int, seeds: int
) -> list[TokenWindows]:
    """Windows for each seed."""
    windows = dofla.token_windows(text, tokenizer, length=length, windows=count * seeds, model=model)
    return [TokenWindows(windows.input_ids[count * seed : count * (seed + 1)]) for seed in range(seeds)]


def _windows(where: object, tokenizer: PreTrainedTokenizerBase, length: int, count: int) -> TokenWindows:
    count = count if length <= 512 else max(1, count // 3)
    return dofla.token_windows(where, tokenizer, length=length, windows=count, split="all")


def _mean_cell(found: Iterable[list[Figures]]) -> str:
    """The mean over kinds of text and seeds, and what it is in perplexity."""
    mean = fmean(x["loss_increase"] for figures in found for x in figures)
    return f"{mean:.4f}, {perplexity(mean)}"


def _cell(found: list[Figures]) -> str:
    means = [x["loss_increase"] for x in found]
    mean = sum(means) / len(means)
    kl = sum(x["kl"] for x in found) / len(found)
    if len(means) > 1:
        return f"{mean:.4f} ± {(max(means) - min(means)) / 2:.4f}, {kl:.4f}"
    low, high = found[0]["loss_increase_interval"]
    return f"{mean:.4f} ({low:.4f} to {high:.4f}), {kl:.4f}"


if __name__ == "__main__":
    typer.run(main)
