"""What training end to end on long windows brings, and what documents among them do in which something is looked up.

    python benchmarks/quality/recall_training.py --model models/smollm2-135m \\
        --calibrate data/english-train.txt.gz \\
        --text data/english-val.txt.gz --text data/stories-val.txt.gz \\
        --text data/books-val.txt.gz --hay data/books-val.txt.gz --seeds 3

A student of ``dofla.compress``, as it is made, and trained on as many windows of prose (``--share 0``), or with a share
of documents in their place: prose in which four needles are hidden, which are then all asked for and told again
(benchmarks/peers/needles.py, by the template *magic numbers*). Each is judged by its loss on windows of each kind of
text, where Python source is always among them, and by the needles it finds in the prose of ``--hay``, written by
another template, *pass codes*: by generation, as benchmarks/peers/lookups.py asks. With several seeds, the student is
trained on other windows each time, and the spread is half the range of the means. ``--save`` keeps what was trained, as
adapters, for benchmarks/peers/continuation.py, say.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import typer
from compressed import MEASURED, sources
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import dofla
from dofla.data import TokenWindows
from dofla.display import table
from dofla.distillation.compressor import Compressor
from dofla.evaluation.language import next_token_figures
from dofla.integration.recorder import evaluation_mode
from dofla.runs.teacher import load_teacher
from dofla.storage.files import write_json

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("peers", "speed")]
from latency import head_budgets_of
from lookups import ASKING, all_tokens, answer
from needles import NEEDLES, Writer
from questions import Task

KIND, TRAINED_ON, ASKED_BY = "multi-key", "magic numbers", "pass codes"
SPARE = 256
"""Tokens of a document that questions and answers take at most."""
Figures = dict[str, float]


def document(writer: Writer, length: int, seed: int) -> list[int]:
    """A context with needles, then what each question asks and what is right, then prose as far as ``length`` goes."""
    (context,) = writer.contexts(KIND, TRAINED_ON, length - SPARE, 1, seed)
    ids = list(context.ids)
    for question in context.questions:
        ids += question.ids + writer.pieces(f" {question.answers[0]}.")
    first = Random(seed).randrange(len(writer.text) - SPARE)
    return (ids + writer.text[first:])[:length]


def mixed(prose: TokenWindows, writer: Writer, share: float, seed: int) -> TokenWindows:
    """The windows, and documents in the place of a share of them, spread evenly."""
    ids, count = prose.input_ids.clone(), round(share * len(prose))
    for n, place in enumerate(torch.linspace(0, len(prose) - 1, count).round().long().tolist()):
        ids[place] = torch.tensor(document(writer, prose.length, 10_000 * seed + n))
    return TokenWindows(ids)


def judge(
    student: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: dict[str, TokenWindows], tasks: list[Task]
) -> Figures:
    """Loss increase and KL of each text, and the share of needles found in each length."""
    found: Figures = {}
    with evaluation_mode(student):
        for name, windows in texts.items():
            figures = next_token_figures(student, windows)
            found |= {f"{name}, loss increase": figures["loss_increase"], f"{name}, KL": figures["kl"]}
    for task in tasks:
        scores = [score for context in task.contexts for score in answer(student, tokenizer, context)[0]]
        found[f"found in {task.length}"] = sum(scores) / len(scores)
    return found


def cell(found: list[Figures], name: str) -> str:
    values = [figures[name] for figures in found]
    spread = f" ± {(max(values) - min(values)) / 2:.3f}" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.3f}{spread}"


def main(
    model: Annotated[str, typer.Option(help="Folder or hub name of a causal model.")],
    calibrate: Annotated[Path, typer.Option(help="Text to make and to train students on.")],
    hay: Annotated[Path, typer.Option(help="Prose to hide needles in that are asked for.")],
    text: Annotated[list[Path] | None, typer.Option(help="Texts to judge on; repeatable.")] = None,
    share: Annotated[list[float] | None, typer.Option(help="Of documents; repeatable; default 0 and 0.5.")] = None,
    budget: Annotated[int, typer.Option(help="In features per KV head.")] = 64,
    length: Annotated[int, typer.Option(help="Tokens of the windows trained and judged on.")] = 2048,
    steps: Annotated[int, typer.Option(min=1, help="Of one window each.")] = 30,
    rate: Annotated[float, typer.Option(help="Learning rate of weights.")] = 3e-4,
    precision: Annotated[str | None, typer.Option(help="bf16, or float32 by default.")] = None,
    again: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Compute layers twice instead of keeping what they saw.")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Draws of the windows trained on.")] = 1,
    plan: Annotated[Path | None, typer.Option(help="Of a student whose head budgets to take.")] = None,
    windows: Annotated[int, typer.Option(help="Of each text.")] = 8,
    questions: Annotated[int, typer.Option(help="Of each length, at least.")] = 50,
    asked_length: Annotated[list[int] | None, typer.Option(help="Repeatable; default 1024 and 2048.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    save: Annotated[Path | None, typer.Option(help="Folder of trained adapters, by documents and seed.")] = None,
) -> None:
    teacher, tokenizer = load_teacher(model, "float32")
    known = dofla.token_windows(calibrate, tokenizer, length=512, windows=MEASURED)
    prose = dofla.token_windows(calibrate, tokenizer, length=length, windows=steps * seeds)
    compressor = Compressor(teacher, known)
    head_budgets = compressor.head_budgets(budget) if plan is None else head_budgets_of(plan)
    texts = {
        name: dofla.token_windows(where, tokenizer, length=length, windows=windows, split="all")
        for name, where in sources(text or []).items()
    }
    training = Writer(tokenizer, prose.input_ids.flatten().tolist())
    asking = Writer(tokenizer, all_tokens(hay, tokenizer))
    count = math.ceil(questions / NEEDLES)
    tasks = [asking.task(KIND, ASKED_BY, n, count, ASKING) for n in asked_length or [1024, 2048]]
    rows: dict[str, list[Figures]] = {}

    def note(name: str, figures: Figures) -> None:
        rows.setdefault(name, []).append(figures)
        typer.echo(f"{name}: " + ", ".join(f"{key} {value:.4f}" for key, value in figures.items()), err=True)
        if out is not None:
            write_json(out, {"rows": rows})

    with compressor.made(budget, head_budgets) as student:
        note("at once", judge(student, tokenizer, texts, tasks))
    for seed in range(seeds):
        for each in share or [0.0, 0.5]:
            read = mixed(TokenWindows(prose.input_ids[steps * seed : steps * (seed + 1)]), training, each, seed)
            name = f"{each:.0%} documents"
            options = {"learning_rates": {"weights": rate}, "precision": precision, "seed": seed}
            options |= {"batch_size": 1, "gradient_checkpointing": again}
            with compressor.made(budget, head_budgets) as student:
                started = time.perf_counter()
                dofla.distill_end_to_end(student, read, steps=steps, **options)
                minutes = (time.perf_counter() - started) / 60
                if save is not None:
                    dofla.save_adapter(student, save / f"{name}, {seed}")
                note(name, {"minutes": minutes} | judge(student, tokenizer, texts, tasks))
    columns = list(dict.fromkeys(key for found in rows.values() for key in found[0]))
    shown = table("", *rows)
    for name in columns:
        shown.add_row(name, *(cell(found, name) if name in found[0] else "" for found in rows.values()))
    Console(width=160).print(shown)


if __name__ == "__main__":
    typer.run(main)
