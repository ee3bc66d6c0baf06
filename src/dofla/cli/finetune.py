"""The verb ``dofla finetune``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from dofla.cli.options import MODEL, TEXT, BaseModel, Dtype, ModelArgument, Out, Seed, existing
from dofla.cli.verb import current_view


def finetune(
    model: ModelArgument,
    task: Annotated[
        str,
        typer.Option(
            help="Training task: a JSONL file, or a name in --tasks-folder or on the hub.", rich_help_panel=TEXT
        ),
    ],
    out: Out,
    test: Annotated[
        Path | None,
        typer.Option(help="JSONL file to test on.", rich_help_panel=TEXT, callback=existing("items of a task")),
    ] = None,
    tasks_folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder with NAME-train.jsonl and NAME-test.jsonl (or .gz); default: the current one.",
            rich_help_panel=TEXT,
            callback=existing("files of tasks"),
        ),
    ] = None,
    style: Annotated[
        str | None,
        typer.Option(help="Prompt style: question, passage, letters or blank; default by task.", rich_help_panel=TEXT),
    ] = None,
    items: Annotated[
        int | None, typer.Option(help="Training items, at most; default: all.", rich_help_panel=TEXT)
    ] = None,
    test_items: Annotated[
        int | None, typer.Option(help="Test items, at most; default: all.", rich_help_panel=TEXT)
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate; default: the paper's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Items per step; default: the paper's.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the items; default: the paper's.")] = None,
    keep: Annotated[str | None, typer.Option(help="Epoch to keep: best or last; default: the paper's.")] = None,
    lora_rank: Annotated[int | None, typer.Option(help="Rank of LoRA updates; default: train all weights.")] = None,
    train_feature_maps: Annotated[
        bool, typer.Option("--train-feature-maps", help="Train feature maps as well.")
    ] = False,
    mixed_precision: Annotated[str, typer.Option(help="Mixed precision: no or bf16.")] = "no",
    forward_batch: Annotated[int, typer.Option(help="Items per forward pass.")] = 16,
    base_model: BaseModel = None,
    dtype: Dtype = None,
    device: Annotated[
        str | None,
        typer.Option(help="Device: cpu, cuda, cuda:1, mps or auto; default: accelerate's.", rich_help_panel=MODEL),
    ] = None,
    seed: Seed = 0,
) -> dict[str, Any]:
    """Fine-tune a model, compressed or not, on a multiple-choice task."""
    if device is not None:
        from dofla.runs.teacher import device_of

        os.environ["ACCELERATE_TORCH_DEVICE"] = str(device_of(device))  # which accelerate places the model by
    from dofla.runs.finetune import MODEL as SAVED
    from dofla.runs.finetune import run_finetune

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
    view.say(f"\nmodel of epoch {result.kept} written to {out / SAVED}")
    return {"model": out / SAVED, "accuracy": result.accuracy, **result.to_dict()}
