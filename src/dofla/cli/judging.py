"""The verb ``dofla evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dofla.cli.endings import following, written
from dofla.cli.options import (
    COMPRESSED,
    DATA,
    CompressedModel,
    Device,
    Given,
    Length,
    Windows,
    new_file,
    source,
    text_of,
)
from dofla.cli.settings import Function
from dofla.cli.verb import current_view
from dofla.errors import DoflaError


def evaluate(
    model: CompressedModel,
    data: Annotated[
        str | None, typer.Option(help=f"Evaluation text, its held-out part: {DATA}.", callback=source)
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks, comma-separated: JSONL files of multiple choice, or lm-eval names.")
    ] = None,
    windows: Windows = 64,
    length: Length = 512,
    out: Annotated[Path | None, typer.Option(help="JSON file to write; it must be new.", callback=new_file)] = None,
    device: Device = None,
    opening: Given = COMPRESSED,
    text: Given = text_of(),
    settings: Given = Function("evaluation/run.py", "evaluate", ("progress",)),
    of_tasks: Given = Function("tasks/run.py", "evaluate_tasks", ("progress",)),
    showing: Given = Function("evaluation/run.py", "Evaluation.parts"),
) -> dict[str, Any]:
    """Compare a compressed model with its original.

    Reads held-out text, does tasks, or both.
    """
    from dofla.cli.texts import windows_from
    from dofla.evaluation import evaluate as measure
    from dofla.integration.surgery import describe
    from dofla.runs.opening import open_converted
    from dofla.storage.files import write_json
    from dofla.tasks import evaluate_tasks

    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    if data is None and not names:
        raise DoflaError("nothing to evaluate on: give --data TEXT, or --tasks with one or more names, or both")
    view = current_view()
    opened, tokenizer = open_converted(model, device=device, **opening)
    figures: dict[str, Any] = {}
    if data is not None:
        cut = {**text, "length": length, "windows": windows}
        tokens = windows_from(data, opened, tokenizer, cut, "validation")
        with view.progress("evaluate") as progress:
            result = measure(opened, tokens, progress=progress, **settings)
        view.show(*result.parts(**showing))
        figures = result.to_dict()
    if names:
        with view.progress("tasks") as progress:
            found = evaluate_tasks(opened, tokenizer, names, progress=progress, **of_tasks)
        view.show(found)
        figures = {**(figures or {"model": describe(opened)}), "tasks": found.to_dict()}
    if out is not None:
        write_json(out, figures)
        written("figures", out)
    if opened.can_generate():
        following("chat", model)
    return figures
