"""The verb ``dofla evaluate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dofla.cli.options import (
    DATA,
    OUTPUT,
    TEXT,
    BaseModel,
    BatchSize,
    Device,
    Dtype,
    Length,
    Offload,
    Padded,
    Seed,
    StudentArgument,
    Windows,
    existing,
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
            help="Tasks, comma-separated: JSONL files of multiple choice, or lm-eval names.", rich_help_panel=TEXT
        ),
    ] = None,
    out: Figures = None,
    windows: Windows = 64,
    length: Length = 512,
    batch_size: BatchSize = 1,
    limit: Annotated[int | None, typer.Option(help="Items per task; default: all.", rich_help_panel=TEXT)] = None,
    include_path: Annotated[
        Path | None,
        typer.Option(help="Folder of lm-eval tasks (YAML).", rich_help_panel=TEXT, callback=existing("tasks")),
    ] = None,
    metadata: Annotated[
        str | None, typer.Option(help="JSON object for lm-eval tasks that make their items.", rich_help_panel=TEXT)
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Print a row per layer as well.")] = False,
    padded: Padded = False,
    base_model: BaseModel = None,
    dtype: Dtype = None,
    device: Device = None,
    offload: Offload = None,
    seed: Seed = 0,
) -> dict[str, Any]:
    """Compare a compressed model with its original.

    Reads held-out text, does tasks, or both.
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
            found = evaluate_tasks(
                model,
                tokenizer,
                names,
                limit=limit,
                seed=seed,
                include_path=include_path,
                metadata=_object(metadata),
                progress=progress,
            )
        view.show(found)
        figures = {**(figures or {"model": describe(model)}), "tasks": found.to_dict()}
    if out is not None:
        write_json(out, figures)
    return figures


def _object(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise DoflaError(f'metadata is {text!r}: give a JSON object, such as {{"max_seq_lengths": [4096]}}')
    return found
