"""The verbs that measure the quality of a compressed model: evaluate, probe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dofla.cli.options import (
    DATA,
    OUTPUT,
    TEXT,
    BaseModel,
    BatchSize,
    Data,
    Device,
    Dtype,
    Length,
    Offload,
    Padded,
    Seed,
    StudentArgument,
    Windows,
    new_file,
    source,
)
from dofla.cli.verb import current_view
from dofla.errors import DoflaError

Figures = Annotated[
    Path | None, typer.Option(help="JSON file to write; it must be new.", rich_help_panel=OUTPUT, callback=new_file)
]


def evaluate(
    student: StudentArgument,
    data: Annotated[
        str | None,
        typer.Option(help=f"Evaluation text, its held-out part: {DATA}.", rich_help_panel=TEXT, callback=source),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Multiple-choice tasks, comma-separated: JSONL files or lm-eval names.", rich_help_panel=TEXT
        ),
    ] = None,
    out: Figures = None,
    windows: Windows = 64,
    length: Length = 512,
    batch_size: BatchSize = 1,
    limit: Annotated[int | None, typer.Option(help="Items per task; default: all.", rich_help_panel=TEXT)] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Print a row per layer as well.")] = False,
    padded: Padded = False,
    base_model: BaseModel = None,
    dtype: Dtype = None,
    device: Device = None,
    offload: Offload = None,
    seed: Seed = 0,
) -> dict[str, Any]:
    """Compare a compressed model with its original.

    Reads held-out text, answers multiple-choice tasks, or both.
    """
    from dofla.evaluation import evaluate as measure
    from dofla.integration.surgery import describe
    from dofla.runs.recipe import DataSpec
    from dofla.runs.teacher import open_student, windows_of
    from dofla.storage.files import write_json
    from dofla.tasks import evaluate_tasks

    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    if data is None and not names:
        raise DoflaError("nothing to evaluate on: give --data TEXT, or --tasks with one or more names, or both")
    view = current_view()
    model, tokenizer = open_student(student, dtype, base_model, device, offload)
    figures: dict[str, Any] = {}
    if data is not None:
        spec = DataSpec(data, length, windows, split="validation", padded=padded)
        tokens = windows_of(spec, model, tokenizer, seed=seed, view=view)
        with view.progress("evaluate") as progress:
            result = measure(model, tokens, batch_size=batch_size, seed=seed, progress=progress)
        view.show(*result.parts(layers))
        figures = result.to_dict()
    if names:
        with view.progress("tasks") as progress:
            found = evaluate_tasks(model, tokenizer, names, limit=limit, seed=seed, progress=progress)
        view.show(found)
        figures = {**(figures or {"model": describe(model)}), "tasks": found.to_dict()}
    if out is not None:
        write_json(out, figures)
    return figures


def probe(
    student: StudentArgument,
    data: Data,
    out: Figures = None,
    positions: Annotated[bool, typer.Option("--positions", help="Probe: loss by position in the context.")] = False,
    generation: Annotated[
        bool, typer.Option("--generation", help="Probe: greedy continuations, and how long both models agree.")
    ] = False,
    recall: Annotated[bool, typer.Option("--recall", help="Probe: recall of pairs from the context.")] = False,
    passkey: Annotated[bool, typer.Option("--passkey", help="Probe: retrieval of a number in a long text.")] = False,
    lengths: Annotated[
        list[int] | None,
        typer.Option(
            help="Length of a recall prompt, in tokens; repeatable; default 128, 256 and 512.", rich_help_panel=TEXT
        ),
    ] = None,
    count: Annotated[int, typer.Option(help="Prompts per length (and depth, with --passkey) and continuations.")] = 32,
    new_tokens: Annotated[int, typer.Option(help="Length of a continuation, in tokens.")] = 64,
    windows: Windows = 64,
    length: Length = 512,
    batch_size: BatchSize = 1,
    base_model: BaseModel = None,
    dtype: Dtype = None,
    device: Device = None,
    seed: Seed = 0,
) -> dict[str, Any]:
    """Probe how a compressed model uses its context.

    Runs all probes, or those chosen.
    """
    from dofla.evaluation.probe import PROBES
    from dofla.evaluation.probe import probe as look_closer
    from dofla.runs.demo.recall import Villagers
    from dofla.runs.recipe import DataSpec
    from dofla.runs.teacher import open_student, windows_of
    from dofla.storage.files import write_json

    view = current_view()
    model, tokenizer = open_student(student, dtype, base_model, device)
    tokens = windows_of(DataSpec(data, length, windows, split="validation"), model, tokenizer, seed=seed, view=view)
    flags = dict(zip(PROBES, (positions, generation, recall, passkey), strict=True))
    found: dict[str, Any] = {}
    for name in [name for name in PROBES if flags[name]] or PROBES:
        with view.progress(name) as progress:
            result = look_closer(
                model,
                tokenizer,
                tokens,
                wanted=[name],
                recall_text=Villagers(tokenizer) if data == "demo" else None,
                lengths=lengths or (128, 256, 512),
                count=count,
                prompts=count,
                new_tokens=new_tokens,
                batch_size=batch_size,
                seed=seed,
                progress=progress,
            )
        found[name] = getattr(result, name)
    result = replace(result, **found)
    view.show(result)
    if out is not None:
        write_json(out, result.to_dict())
    return result.to_dict()
