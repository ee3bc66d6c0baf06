"""The verb ``dofla compress``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dofla.cli.options import Context, Dtype, KeepSoftmax, ModelArgument, Out, Ratio, RetrievalHeads, Seed, Size
from dofla.cli.verb import current_view


def compress(
    model: ModelArgument,
    out: Out,
    size: Size = None,
    ratio: Ratio = None,
    context: Context = None,
    head_budgets: Annotated[
        str, typer.Option(help="measured on the calibration text; even; or a file of measured ones.")
    ] = "measured",
    retrieval_heads: RetrievalHeads = 0,
    data: Annotated[
        str, typer.Option(help="Calibration text, as for dofla profile; default the model's own samples.")
    ] = "self",
    windows: Annotated[int, typer.Option(help="Number of calibration windows.")] = 12,
    length: Annotated[int, typer.Option(help="Tokens per window.")] = 512,
    prefill: Annotated[
        str, typer.Option(help="How prompts are read: exact, stream (token by token), or auto (exact on a GPU).")
    ] = "auto",
    keep_softmax: KeepSoftmax = None,
    dtype: Dtype = None,
    seed: Seed = 0,
) -> dict[str, Any]:
    """Give a model a compressed cache of constant size, without training."""
    from dofla.distillation.training_free import WAYS
    from dofla.distillation.training_free import compress as make
    from dofla.integration.checkpoint import warn_of_local_base, write_adapter
    from dofla.integration.surgery import plan_of
    from dofla.plans.head_budgets import HeadBudgets, named
    from dofla.runs.recipe import DataSpec
    from dofla.runs.teacher import load_teacher, windows_of
    from dofla.storage.files import new_folder

    view = current_view()
    with new_folder(out) as folder:
        compressed, tokenizer = load_teacher(model, dtype)
        with view.progress("compress"):
            make(
                compressed,
                windows_of(DataSpec(data, length, windows), compressed, tokenizer, seed=seed),
                size,
                ratio=ratio,
                context=context,
                head_budgets=head_budgets if head_budgets in WAYS else HeadBudgets.load(head_budgets),
                retrieval_heads=retrieval_heads,
                tokenizer=tokenizer,
                keep_softmax=keep_softmax or (),
                prefill=prefill,
            )
        write_adapter(compressed, folder)
        tokenizer.save_pretrained(folder)
    warn_of_local_base(compressed, out)
    plan = plan_of(compressed)
    view.show(plan)
    if full_heads := plan.made_by.get("retrieval_heads"):
        view.say(named(full_heads))
    view.say(f"\nadapter written to {out}")
    return {"adapter": out, "state_bytes": plan.state_bytes(compressed.dtype), **plan.to_dict()}
