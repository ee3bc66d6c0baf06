"""What a compressed cache keeps without training, on several kinds of text, beside a window of the same bytes, one
whose tokens all go by their age, and one whose layers are all of one size.

    python benchmarks/quality/compressed.py --model models/smollm2-135m \\
        --calibrate data/english-train.txt.gz \\
        --text data/english-val.txt.gz --text data/stories-val.txt.gz \\
        --text data/books-val.txt.gz --windows 24
    python benchmarks/quality/compressed.py --model models/smollm2-135m --student trained --length 512 --length 2048 ...
    python benchmarks/quality/compressed.py --model models/smollm2-135m \\
        --student trained --trained-length 2048 --rate 3e-4 ...

Python source, the modules of the standard library of the interpreter that runs this, is always among the texts. A loss
increase is the mean over windows, with an interval of 95 % by bootstrap; with several seeds, directions and head
budgets are measured on other windows each time, and the spread is half the range of the means. Behind it stands
KL(teacher ‖ student) of the next-token distributions, which chance moves less. Each loss increase is said as soon as it
is known, the table at the end; with --out all is written as JSON too.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import dofla
from dofla.compression.plan import compressed_plan
from dofla.compression.size import parse_size
from dofla.compression.target import Target
from dofla.data import TokenWindows
from dofla.display import size, table
from dofla.evaluation.language import next_token_figures
from dofla.evaluation.verdict import perplexity
from dofla.integration.converted import Converted
from dofla.integration.recorder import evaluation_mode
from dofla.integration.surgery import convert
from dofla.plans.layers import FeatureLayer
from dofla.runs.opening import open_original
from dofla.storage.files import write_json

Make = Callable[[PreTrainedModel, TokenWindows, TokenWindows | None], PreTrainedModel]
Figures = dict[str, Any]


def options_of(text: str) -> dict[str, Any]:
    """Options of ``dofla.compress``, of ``size=3MiB,retrieval_heads=10``; values are read as YAML."""
    pairs = [each.partition("=") for each in text.split(",") if each]
    if not all(map(all, pairs)):
        raise typer.BadParameter(f"--dofla {text!r}: give NAME=VALUE,NAME=VALUE, options of dofla.compress")
    return {name: yaml.safe_load(value) for name, _, value in pairs}


def window_alone(size: str | int, _: int | None) -> Make:
    """A window and sinks in int8, of as many bytes."""

    def make(model: PreTrainedModel, *_: object) -> PreTrainedModel:
        layers = []
        for layer in compressed_plan(Target.of(model), parse_size(size)).compressed:
            shape = layer.name, layer.kv_heads, layer.head_dim, layer.value_dim
            held = layer.cache_bytes(0, model.dtype.itemsize) // layer.kv_heads
            window = held // (layer.head_dim + layer.value_dim + 2) - layer.sinks
            layers.append(FeatureLayer(*shape, 0, window, layer.sinks, "none", "int8"))
        return dofla.linear.linearize(model, dofla.linear.Plan(layers))

    return make


def compressed(size: str, context: int | None, **options: object) -> Make:
    """:func:`dofla.compress`."""
    options = {"retrieval_heads": 0} | options
    return lambda model, tokens, _: dofla.compress(model, tokens, size, context=context, **options)


def even(size: str, context: int | None) -> Make:
    """:func:`dofla.compress` with the same size for all layers."""
    return compressed(size, context, head_budgets="even")


def by_age(size: str, context: int | None) -> Make:
    """:func:`even`, where all tokens of the tier but one are there for their age."""

    def make(model: PreTrainedModel, tokens: TokenWindows, _: object) -> PreTrainedModel:
        calibration = dofla.calibrate(model, tokens, head_budgets="even", context=context)
        plan = compressed_plan(Target.of(model, context), parse_size(size))
        for layer in plan.compressed:
            layer.newest, layer.heavy_hitters = layer.newest + layer.heavy_hitters - 1, 1
        calibration.apply(convert(model, plan))
        return model

    return make


def trained(size: str, context: int | None, rate: float | None = None) -> Make:
    """:func:`dofla.compress`, and then end to end, :data:`AT_ONCE` tokens a step, on the text that it was measured
    on."""

    def make(model: PreTrainedModel, tokens: TokenWindows, training: TokenWindows) -> PreTrainedModel:
        student = dofla.compress(model, tokens, size, context=context, retrieval_heads=0)
        batch = max(1, AT_ONCE // training.length)
        options = {"steps": len(training) // batch, "batch_size": batch, "context": context}
        rates = {} if rate is None else {"weights": rate}
        dofla.linear.distill_end_to_end(student, training, learning_rates=rates, **options)
        return student

    return make


STUDENTS = {"window": window_alone, "by-age": by_age, "even": even, "compressed": compressed, "trained": trained}
STUDENTS |= {"retrieval": compressed}
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
    cache: Annotated[list[str] | None, typer.Option(help="Sizes; repeatable; default 1.5MiB.")] = None,
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
    calibration: Annotated[
        Path | None, typer.Option(help="Saved calibration of the student compressed; default calibrated anew.")
    ] = None,
    context: Annotated[int | None, typer.Option(help="Positions to read these among; default all there are.")] = None,
    retrieval_heads: Annotated[int, typer.Option(help="Of the student of that name, which hold every token.")] = 8,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Default the checkpoint's, where that is not slow.")] = None,
) -> None:
    names = student or ["window", "compressed"]
    if unknown := set(names) - STUDENTS.keys():
        raise typer.BadParameter(f"no student is called {min(unknown)!r}: choose of {', '.join(STUDENTS)}")
    teacher, tokenizer = open_original(model, dtype)
    texts, lengths = sources(text or []), length or [512]
    judged = {
        (tokens, kind): _windows(where, tokenizer, tokens, windows)
        for tokens, (kind, where) in product(lengths, texts.items())
    }
    students = STUDENTS | {
        "compressed": partial(compressed, calibration=calibration),
        "trained": partial(trained, rate=rate),
        "retrieval": partial(compressed, retrieval_heads=retrieval_heads, tokenizer=tokenizer),
    }
    pools = [_pool(calibrate, tokenizer, teacher, measured_length, MEASURED, seeds), [None] * seeds]
    if "trained" in names:
        pools[1] = _pool(calibrate, tokenizer, teacher, trained_length, TRAINED // trained_length, seeds)
    columns = ["student", "tokens", "state", *texts, "mean, perplexity", "made in"]
    shown, rows = table(*columns, gap=2), []
    for each, name in product(cache or ["1.5MiB"], names):
        found: dict[tuple[int, str], list[Figures]] = {}
        for seed in range(1 if name == "window" else seeds):
            started = time.perf_counter()
            made = students[name](each, context)(teacher, *(pool[seed] for pool in pools))
            seconds = time.perf_counter() - started
            state = Converted.of(made).plan.state_bytes(teacher.dtype)
            with evaluation_mode(made):
                for (tokens, kind), held_out in judged.items():
                    figures = next_token_figures(made, held_out)
                    typer.echo(f"{name}, {each}, seed {seed}: {kind}, {tokens} tokens: {_cell([figures])}", err=True)
                    found.setdefault((tokens, kind), []).append(figures)
            dofla.restore(made)
        for tokens in lengths:
            by_kind = {kind: found[tokens, kind] for kind in texts}
            row = {"student": name, "size": each, "bytes": state, "length": tokens, "texts": by_kind}
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
    interval = found[0]["loss_increase_interval"]
    within = "" if interval is None else f" ({' to '.join(f'{end:.4f}' for end in interval)})"
    return f"{mean:.4f}{within}, {kl:.4f}"


if __name__ == "__main__":
    typer.run(main)
