"""The verbs that judge a student: evaluate, probe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dofla.cli.options import (
    BaseModel,
    BatchSize,
    Data,
    Dtype,
    Length,
    Padded,
    Seed,
    StudentArgument,
    Windows,
    refuse_existing,
)
from dofla.cli.verb import current_view
from dofla.errors import DoflaError


def evaluate(
    student: StudentArgument,
    data: Annotated[str | None, typer.Option(help="Held-out text, as for dofla profile.")] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Multiple-choice tasks, with commas: JSONL files, names lm-eval knows.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    windows: Windows = 64,
    length: Length = 512,
    batch_size: BatchSize = 1,
    limit: Annotated[int | None, typer.Option(help="Items per task; default all.")] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Print a row per layer as well.")] = False,
    harness: Annotated[bool, typer.Option("--harness", help="Put task files through lm-eval, too.")] = False,
    padded: Padded = False,
    base_model: BaseModel = None,
    dtype: Dtype = None,
    seed: Seed = 0,
) -> dict[str, Any]:
    """Compare a student with the softmax model it was, on held-out text and on tasks."""
    from dofla.evaluation import evaluate as measure
    from dofla.integration.surgery import describe
    from dofla.runs.recipe import DataSpec
    from dofla.runs.teacher import open_student, windows_of
    from dofla.storage.files import write_json
    from dofla.tasks import evaluate_tasks

    refuse_existing(out)
    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    if data is None and not names:
        raise DoflaError("nothing to evaluate on: give --data TEXT, or --tasks with one or more names, or both")
    view = current_view()
    model, tokenizer = open_student(student, dtype, base_model)
    figures: dict[str, Any] = {}
    if data is not None:
        spec = DataSpec(data, length, windows, split="validation", padded=padded)
        tokens = windows_of(spec, model, tokenizer, seed=seed)
        with view.progress("evaluate") as progress:
            result = measure(model, tokens, batch_size=batch_size, seed=seed, progress=progress)
        view.show(*result.parts(layers))
        figures = result.to_dict()
    if names:
        with view.progress("tasks") as progress:
            options = {"limit": limit, "harness": harness, "seed": seed, "progress": progress}
            found = evaluate_tasks(model, tokenizer, names, **options)
        view.show(found)
        figures = {**(figures or {"model": describe(model)}), "tasks": found.to_dict()}
    if out is not None:
        write_json(out, figures)
    return figures


def probe(
    student: StudentArgument,
    data: Data,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    positions: Annotated[bool, typer.Option("--positions", help="Loss by position in the context.")] = False,
    generation: Annotated[bool, typer.Option("--generation", help="Continuations, and how long they agree.")] = False,
    recall: Annotated[bool, typer.Option("--recall", help="Pairs told in the context, then asked for.")] = False,
    passkey: Annotated[bool, typer.Option("--passkey", help="A number hidden in a long text.")] = False,
    lengths: Annotated[list[int] | None, typer.Option(help="Tokens of a recall prompt; repeatable.")] = None,
    count: Annotated[int, typer.Option(help="Recall prompts per length (passkey: and depth), and continuations.")] = 32,
    new_tokens: Annotated[int, typer.Option(help="Tokens of a continuation.")] = 64,
    windows: Windows = 64,
    length: Length = 512,
    batch_size: BatchSize = 1,
    base_model: BaseModel = None,
    dtype: Dtype = None,
    seed: Seed = 0,
) -> dict[str, Any]:
    """See what a student still does with its context: all probes, or those named."""
    from dofla.evaluation.probe import PROBES
    from dofla.evaluation.probe import probe as look_closer
    from dofla.runs.demo.recall import Villagers
    from dofla.runs.recipe import DataSpec
    from dofla.runs.teacher import open_student, windows_of
    from dofla.storage.files import write_json

    refuse_existing(out)
    view = current_view()
    model, tokenizer = open_student(student, dtype, base_model)
    tokens = windows_of(DataSpec(data, length, windows, split="validation"), model, tokenizer, seed=seed)
    flags = dict(zip(PROBES, (positions, generation, recall, passkey), strict=True))
    options = {"lengths": lengths or (128, 256, 512), "count": count, "prompts": count, "new_tokens": new_tokens}
    options |= {"batch_size": batch_size, "seed": seed, "recall_text": Villagers(tokenizer) if data == "demo" else None}
    found: dict[str, Any] = {}
    for name in [name for name in PROBES if flags[name]] or PROBES:
        with view.progress(name) as progress:
            result = look_closer(model, tokenizer, tokens, wanted=[name], progress=progress, **options)
        found[name] = getattr(result, name)
    result = replace(result, **found)
    view.show(result)
    if out is not None:
        write_json(out, result.to_dict())
    return result.to_dict()
