"""The verb ``dofla frontier``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dofla.cli.options import BatchSize, Data, Dtype, ModelArgument, Seed, refuse_existing
from dofla.cli.verb import current_view


def frontier(
    model: ModelArgument,
    data: Data,
    lengths: Annotated[list[int] | None, typer.Option(help="Tokens per window; repeatable; default 512.")] = None,
    budgets: Annotated[
        list[int] | None, typer.Option(help="Sizes to try, in features per KV head; repeatable.")
    ] = None,
    target: Annotated[float | None, typer.Option(help="Gap to stay within, in nats per token: stop there.")] = None,
    windows: Annotated[int, typer.Option(help="To judge by, of each length.")] = 12,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    batch_size: BatchSize = 1,
    dtype: Dtype = None,
    seed: Seed = 0,
) -> dict[str, Any]:
    """How many bytes a model needs on your text: gap by size of state and length."""
    from dofla.integration.fading import WINDOWS
    from dofla.runs.frontier import BUDGETS
    from dofla.runs.frontier import frontier as measure
    from dofla.runs.recipe import DataSpec
    from dofla.runs.teacher import load_teacher, windows_of
    from dofla.storage.files import write_json

    refuse_existing(out)
    view = current_view()
    teacher, tokenizer = load_teacher(model, dtype)
    tokens = windows_of(DataSpec(data, 512, WINDOWS), teacher, tokenizer, seed=seed)
    specs = [DataSpec(data, length, windows, split="validation") for length in dict.fromkeys(lengths or [512])]
    judged = [windows_of(spec, teacher, tokenizer, seed=seed) for spec in specs]
    with view.progress("frontier") as bar:
        found = measure(
            teacher,
            tokens,
            judged,
            budgets=budgets or BUDGETS,
            target=target,
            batch_size=batch_size,
            progress=bar.stage,
        )
    view.show(found)
    if out is not None:
        write_json(out, found.to_dict())
    return found.to_dict()
