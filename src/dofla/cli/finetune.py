"""The verb ``dofla finetune``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dofla.cli.options import BaseModel, Dtype, Seed
from dofla.cli.verb import current_view


def finetune(
    model: Annotated[str, typer.Argument(help="Folder or hub name (a student's too), or 'demo'.")],
    task: Annotated[str, typer.Option(help="JSONL file to learn; or a name, from --tasks-folder or the hub.")],
    out: Annotated[Path, typer.Option(help="New folder to write.")],
    test: Annotated[Path | None, typer.Option(help="JSONL file to test on.")] = None,
    tasks_folder: Annotated[
        Path | None, typer.Option(help="Has NAME-train.jsonl, NAME-test.jsonl (or .gz); default here.")
    ] = None,
    style: Annotated[str | None, typer.Option(help="question, passage, letters or blank; default by task.")] = None,
    items: Annotated[int | None, typer.Option(help="Items to learn at most.")] = None,
    test_items: Annotated[int | None, typer.Option(help="Items to test on at most.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="At its peak; default the paper's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Items per step; default the paper's.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Default the paper's.")] = None,
    keep: Annotated[str | None, typer.Option(help="best or last epoch; default the paper's.")] = None,
    lora_rank: Annotated[int | None, typer.Option(help="Train low-rank updates instead of all weights.")] = None,
    train_feature_maps: Annotated[
        bool, typer.Option("--train-feature-maps", help="Train a student's feature maps too.")
    ] = False,
    mixed_precision: Annotated[str, typer.Option(help="no or bf16.")] = "no",
    forward_batch: Annotated[int, typer.Option(help="Items per forward pass.")] = 16,
    base_model: BaseModel = None,
    dtype: Dtype = None,
    seed: Seed = 0,
) -> dict[str, Any]:
    """Teach a model, softmax or linear, a multiple-choice task."""
    from dofla.runs.finetune import MODEL, run_finetune

    given = {"learning_rate": learning_rate, "batch_size": batch_size, "epochs": epochs, "keep": keep}
    view = current_view()
    result = run_finetune(
        model,
        task,
        out,
        test=test,
        tasks_folder=tasks_folder,
        style=style,
        items=items,
        test_items=test_items,
        changes={key: value for key, value in given.items() if value is not None},
        base_model=base_model,
        dtype=dtype,
        seed=seed,
        view=view,
        lora_rank=lora_rank,
        train_feature_maps=train_feature_maps,
        mixed_precision=mixed_precision,
        forward_batch=forward_batch,
    )
    view.show(result)
    view.say(f"\nmodel of epoch {result.kept} written to {out / MODEL}")
    return {"model": out / MODEL, "accuracy": result.accuracy, **result.to_dict()}
