"""The verb ``dofla compress``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dofla.cli.options import (
    OUTPUT,
    TEXT,
    Context,
    Device,
    Dtype,
    KeepSoftmax,
    Length,
    ModelArgument,
    Offload,
    Out,
    Ratio,
    RetrievalHeads,
    Seed,
    SelfData,
    Size,
)
from dofla.cli.verb import current_view


def compress(
    model: ModelArgument,
    out: Out,
    size: Size = None,
    ratio: Ratio = None,
    context: Context = None,
    head_budgets: Annotated[
        str, typer.Option(help="Bytes of each KV head: measured on the calibration text, even, or a saved file.")
    ] = "measured",
    retrieval_heads: RetrievalHeads = 0,
    data: SelfData = "self",
    windows: Annotated[int, typer.Option(help="Number of calibration windows.", rich_help_panel=TEXT)] = 12,
    length: Length = 512,
    prefill: Annotated[
        str, typer.Option(help="How prompts are read: exact, stream (token by token), or auto (exact on a GPU).")
    ] = "auto",
    keep_softmax: KeepSoftmax = None,
    merged: Annotated[
        bool,
        typer.Option("--merged", help="Write the whole model, as for vLLM, not an adapter.", rich_help_panel=OUTPUT),
    ] = False,
    dtype: Dtype = None,
    device: Device = None,
    offload: Offload = None,
    seed: Seed = 0,
) -> dict[str, Any]:
    """Compress the cache of a model to a constant size; no training."""
    from dofla.distillation.training_free import WAYS
    from dofla.distillation.training_free import compress as make
    from dofla.integration.checkpoint import warn_of_local_base, write_adapter
    from dofla.integration.student import Student
    from dofla.plans.head_budgets import HeadBudgets, named
    from dofla.runs.recipe import DataSpec
    from dofla.runs.teacher import load_teacher, windows_of
    from dofla.storage.files import new_folder

    view = current_view()
    with new_folder(out) as folder:
        compressed, tokenizer = load_teacher(model, dtype, device, offload)
        calibration = windows_of(DataSpec(data, length, windows), compressed, tokenizer, seed=seed, view=view)
        with view.progress("compress") as bar:
            make(
                compressed,
                calibration,
                size,
                ratio=ratio,
                context=context,
                head_budgets=head_budgets if head_budgets in WAYS else HeadBudgets.load(head_budgets),
                retrieval_heads=retrieval_heads,
                tokenizer=tokenizer,
                keep_softmax=keep_softmax or (),
                prefill=prefill,
                progress=bar.stage,
            )
        if merged:
            compressed.save_pretrained(folder)
        else:
            write_adapter(compressed, folder)
        tokenizer.save_pretrained(folder)
    if not merged:
        warn_of_local_base(compressed, out)
    plan = Student.of(compressed).plan
    view.show(plan)
    if full_heads := plan.made_by.get("retrieval_heads"):
        view.say(named(full_heads))
    view.say(f"\n{'model' if merged else 'adapter'} written to {out}")
    return {"folder" if merged else "adapter": out, "state_bytes": plan.state_bytes(compressed.dtype), **plan.to_dict()}
